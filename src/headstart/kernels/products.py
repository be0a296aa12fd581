"""Products with the weights of linear layers: cpu, cuda or mlx's own, which are the oracle.

mlx's products change their order of summation with the number of rows, and on CUDA read quantised weights again for
every row, so that verifying costs as much as decoding. Ours read a weight once for all rows, and sum a row in one
order for any number of them.
"""

from math import prod

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from . import cpu
from .cuda import on_cuda
from .cuda.products import MOST_ROWS, SumOrder, launch_products, matrix_weights, product_refusal


def product(x: mx.array, layer: nn.Module) -> mx.array:
    """Return `layer(x)`, where `layer` is linear: [..., K] → [..., N]. An embedding's is `as_linear`."""
    return products(x, layer)[0]


def products(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """Return `layer(x)` for every layer, in one launch where they are of one kind."""
    if (native := cpu.native()) is not None:
        if made := cpu.native_products(native, x, layers):
            return made
        return [(cpu.native_products(native, x, [layer]) or [stock_product(x, layer)])[0] for layer in layers]
    found = [matrix_weights(layer) for layer in layers]
    if not on_cuda() or prod(x.shape[:-1]) > MOST_ROWS or any(product_refusal(x.dtype, w) for w in found):
        return [stock_product(x, layer) for layer in layers]
    if len({SumOrder.of(weights) for weights in found}) > 1:
        made = [launch_products(x, [weights])[0] for weights in found]
    else:
        made = launch_products(x, found)
    return cpu.add_biases(made, layers)


def swiglu_product(x: mx.array, gate: nn.Module, up: nn.Module) -> mx.array:
    """Return `silu(gate(x)) * up(x)`, the first half of an MLP."""
    if (native := cpu.native()) is not None and (made := cpu.native_products(native, x, (gate, up), gated=True)):
        return made[0]
    return swiglu(*products(x, gate, up))


def stock_product(x: mx.array, layer: nn.Module) -> mx.array:
    """Return mlx's own product."""
    made: mx.array = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
    return made
