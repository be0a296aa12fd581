"""Products with the weights of linear layers: cpu, cuda, metal or mlx's own, which are the oracle.

mlx's products change their order of summation with the number of rows, and on CUDA read quantised weights again for
every row, so that verifying costs as much as decoding. Ours read a weight once for all rows, and sum a row in one
order for any number of them.
"""

from collections.abc import Callable, Sequence
from math import prod

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from . import cpu, metal
from .adapters import add_adapters, has_adapters
from .cuda import on_cuda
from .cuda.products import MOST_ROWS, MatrixWeights, SumOrder, launch_products, matrix_weights, product_refusal
from .metal.products import SLICES, metal_products, product_shape

# Stock products whose rows are independent on some chips: the least and most rows that they compute at a time. MLX
# changes its kernel at 2 rows on M3 and newer, and at 6 to 33 by chip and shape.
STOCK_ROWS = {
    "stock": (1, metal.MOST_ROWS),
    "stock-split": (1, 5),
    "stock-padded": (2, 11),
    "stock-padded-5": (2, 5),
}


def product(x: mx.array, layer: nn.Module) -> mx.array:
    """Return `layer(x)`, where `layer` is linear: [..., K] → [..., N]. An embedding's is `as_linear`."""
    return products(x, layer)[0]


def products(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """Return `layer(x)` for every layer, in one launch where they are of one kind, with what adapters add."""
    return add_adapters(_products(x, *layers), x, layers)


def _products(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    if (native := cpu.native()) is not None:
        if made := cpu.native_products(native, x, layers):
            return made
        return [(cpu.native_products(native, x, [layer]) or [stock_product(x, layer)])[0] for layer in layers]
    if metal.on_metal() and prod(x.shape[:-1]) <= metal.MOST_ROWS:
        return chosen_products(
            "product",
            x.dtype,
            layers,
            launch=lambda weights, slices: metal_products(x, weights, slices),
            stock=lambda layer, name: split_product(x, layer, *STOCK_ROWS.get(name, STOCK_ROWS["stock"])),
        )
    found = [matrix_weights(layer) for layer in layers]
    if not _fits(x, found):
        return [stock_product(x, layer) for layer in layers]
    if len({SumOrder.of(weights) for weights in found}) > 1:
        made = [launch_products(x, [weights])[0] for weights in found]
    else:
        made = launch_products(x, found)
    return [y + layer["bias"] if "bias" in layer else y for y, layer in zip(made, layers, strict=True)]


def _fits(x: mx.array, weights: list[MatrixWeights]) -> bool:
    """Return whether our product takes all of these on this device."""
    return on_cuda() and prod(x.shape[:-1]) <= MOST_ROWS and not any(product_refusal(x.dtype, w) for w in weights)


def swiglu_product(x: mx.array, gate: nn.Module, up: nn.Module) -> mx.array:
    """Return `silu(gate(x)) * up(x)`, the first half of an MLP."""
    if (native := cpu.native()) is not None and (made := cpu.native_products(native, x, (gate, up), gated=True)):
        return made[0]
    found = [matrix_weights(gate), matrix_weights(up)]
    fused = _fits(x, found) and SumOrder.of(found[0]) == SumOrder.of(found[1])
    if fused and not has_adapters(gate, up):
        return launch_products(x, found, gated=True)[0]
    return swiglu(*products(x, gate, up))


def chosen_products(
    operation: str,
    dtype: mx.Dtype,
    layers: Sequence[nn.Module],
    launch: Callable[[list[MatrixWeights], int], list[mx.array]],
    stock: Callable[[nn.Module, str], mx.array],
) -> list[mx.array]:
    """Compute each layer by the kernel that was chosen for its shape: ours by `launch` with the slices of k, several
    at once where they can be; others by `stock`, with their name."""
    found = [matrix_weights(layer) for layer in layers]
    shapes = [product_shape(dtype, *pair) for pair in zip(layers, found, strict=True)]
    names = [metal.chosen_kernel(operation, shape) for shape in shapes]
    launches: dict[tuple[str, int, int], list[int]] = {}
    for index, (name, weights) in enumerate(zip(names, found, strict=True)):
        if name in SLICES:
            launches.setdefault((name, weights.bits, weights.group), []).append(index)
    made: dict[int, mx.array] = {}
    for (name, *_), together in launches.items():
        made |= dict(zip(together, launch([found[index] for index in together], SLICES[name]), strict=True))
    return [made[i] if i in made else stock(layer, names[i]) for i, layer in enumerate(layers)]


def split_product(x: mx.array, layer: nn.Module, least: int, most: int) -> mx.array:
    """Return mlx's own product, computed for at least and at most so many rows at a time."""
    rows = prod(x.shape[:-1])
    if least <= rows <= most:
        return stock_product(x, layer)
    flat, count = x.reshape(rows, -1), -(-rows // most)
    if rows < least:
        flat = mx.pad(flat, [(0, least - rows), (0, 0)])
    parts = [stock_product(part, layer) for part in mx.split(flat, [rows * i // count for i in range(1, count)])]
    return mx.concatenate(parts)[:rows].reshape(*x.shape[:-1], -1)


def stock_product(x: mx.array, layer: nn.Module) -> mx.array:
    """Return mlx's own product."""
    made: mx.array = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
    return made
