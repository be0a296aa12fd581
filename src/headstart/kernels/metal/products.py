"""Products with weights for a few rows on Metal: see `products.metal`."""

from functools import cache
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..products import stock_product
from ..weights import MatrixWeights, weight_names
from .choice import MOST_ROWS
from .device import metal_kernel, type_name

OUTPUTS, VALUES = 4, 16  # as in products.metal
ROWS = (1, 2, 4, 6)  # side by side: with OUTPUTS of each, at most 24 sums in a thread's registers
# Stock products whose rows are independent on some chips: the least and most rows that they compute at a time. MLX
# changes its kernel at 2 rows on M3 and newer, and at 6 to 33 by chip and shape.
STOCK_ROWS = {
    "stock": (1, MOST_ROWS),
    "stock-split": (1, 5),
    "stock-padded": (2, 11),
    "stock-padded-5": (2, 5),
}
SLICES = {"metal-split": 4, "metal-columns": 1}  # simdgroups that split k, by the name of a kernel
SIMDGROUPS = {4: 4, 1: 2}  # of a threadgroup, by slices


def product_shape(dtype: mx.Dtype, layer: nn.Module, weights: MatrixWeights) -> str:
    """Return what a kernel is chosen by: the shape and type of the weights."""
    size = "×".join(str(length) for length in (*weights.weight.shape[:-1], weights.inputs))
    held = type_name(weights.weight.dtype)
    if weights.scales is not None:
        held = f"{weights.bits} bits in groups of {weights.group}"
    kind = ["not affine"] * (weights.mode != "affine") + ["biased"] * ("bias" in layer)
    return ", ".join([size, held, type_name(dtype), *kind])


def metal_refusal(dtype: mx.Dtype, layer: nn.Module, weights: MatrixWeights) -> str | None:
    """Return why a layer's weights do not fit the kernels; None if they do."""
    if "bias" in layer:
        return "it has a bias"
    if dtype not in (mx.bfloat16, mx.float16, mx.float32):
        return f"activations are {type_name(dtype)}"
    if weights.weight.size < 8:
        return "fewer than 8 words of weights"  # MLX passes them in another address space
    if weights.scales is None:
        fits = weights.weight.dtype == dtype and dtype != mx.float32 and weights.inputs % VALUES == 0
        return None if fits else "weights are not of the activations' 16-bit type, in multiples of 16"
    if weights.mode != "affine" or weights.scales.dtype != dtype:
        return "not quantised in the affine mode with scales of the activations' type"
    if weights.bits not in (4, 8) or weights.group not in (32, 64, 128):
        return f"{weights.bits} bits in groups of {weights.group}"
    return None


def metal_products(x: mx.array, weights: list[MatrixWeights], slices: int) -> list[mx.array]:
    """Return x [..., K] by every weight [N, K], in one launch. All have the same K, bits and group size."""
    rows = prod(x.shape[:-1])
    pass_rows = next((size for size in ROWS if rows <= size), ROWS[-1])
    kernel = _product_kernel(len(weights), weights[0].scales is not None, slices)
    return launch_multiply(kernel, x, [], weights, slices, -(-rows // pass_rows), pass_rows, x.shape[:-1])


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


# Passes over the rows are neighbours in the grid, so that all but the first find the weights in a cache.
START = """
  int rows = 1, inputs[PASS_ROWS], outputs[PASS_ROWS];
  for (int i = 0; i + 1 < x_ndim; ++i) rows *= x_shape[i];
  for (int r = 0; r < PASS_ROWS; ++r) {
    const int row = int(threadgroup_position_in_grid.x) * PASS_ROWS + r;
    inputs[r] = metal::min(row, rows - 1);
    outputs[r] = row < rows ? row : -1;
  }
"""


@cache
def _product_kernel(count: int, quantised: bool, slices: int) -> Any:
    source = multiply(START, count, quantised, slices, axis=0)
    names = ("x", *weight_names(count, quantised))
    return metal_kernel("product", names, tuple(f"out{i}" for i in range(count)), source, "products")


def multiply(start: str, count: int, quantised: bool, slices: int, axis: int, expert: str = "0") -> str:
    """Return `start` and the code that multiplies by `expert` of the weights: threadgroups count through the outputs
    of all."""
    simdgroups = SIMDGROUPS[slices]
    span = OUTPUTS * simdgroups // slices  # outputs of a threadgroup
    simdgroup = "int(simdgroup_index_in_threadgroup)"
    slice_, offset = (simdgroup, "0") if slices > 1 else ("0", f"{OUTPUTS} * {simdgroup}")
    sums = f"threadgroup float sums[{slices * OUTPUTS} * PASS_ROWS];" if slices > 1 else ""
    code = [f"{sums}{start}const int K = x_shape[x_ndim - 1];\nint tile = int(threadgroup_position_in_grid.y);"]
    for i in range(count):
        scales = f"s{i} + at * (K / GROUP), b{i} + at * (K / GROUP)"
        if not quantised:
            scales = ", ".join(["static_cast<const device T*>(nullptr)"] * 2)
        code.append(f"""
          const int N{i} = w{i}_shape[{axis}], tiles{i} = (N{i} + {span - 1}) / {span};
          if (tile >= 0 && tile < tiles{i}) {{
            const long at = static_cast<long>({expert}) * N{i};
            headstart::product<T, BITS, GROUP, PASS_ROWS, {slices}>(
                x, w{i} + at * w{i}_shape[{axis + 1}], {scales}, out{i}, N{i}, K, tile * {span} + {offset}, inputs,
                outputs, {"sums" if sums else "static_cast<threadgroup float*>(nullptr)"}, {slice_},
                int(thread_index_in_simdgroup));
          }}
          tile -= tiles{i};""")
    return "".join(code)


def launch_multiply(
    kernel: Any,
    x: mx.array,
    extra: list[mx.array],
    weights: list[MatrixWeights],
    slices: int,
    passes: int,
    pass_rows: int,
    shape: tuple[int, ...],
) -> list[mx.array]:
    """Run a kernel with `multiply` in it → [*shape, N] for every weight."""
    threads, first = 32 * SIMDGROUPS[slices], weights[0]
    span = OUTPUTS * SIMDGROUPS[slices] // slices
    made: list[mx.array] = kernel(
        inputs=[x, *extra, *(array for each in weights for array in each.arrays())],
        template=[("T", x.dtype), ("BITS", first.bits), ("GROUP", first.group), ("PASS_ROWS", pass_rows)],
        grid=(threads * passes, sum(-(-each.outputs // span) for each in weights), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*shape, each.outputs) for each in weights],
        output_dtypes=[x.dtype] * len(weights),
    )
    return made
