"""Products with weights for a few rows on Metal: see `products.metal`."""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..products import stock_product
from ..weights import MatrixWeights, weight_names
from .choice import MOST_ROWS
from .device import metal_kernel, type_name

OUTPUTS, VALUES = 4, 16  # as in products.metal
ROWS = (1, 2, 4)  # side by side: with OUTPUTS of each, at most 16 sums in a thread's registers
# Stock products whose rows are independent on some chips: the least and most rows that they compute at a time. MLX
# changes its kernel at 2 rows on M3 and newer, and at 6 to 33 by chip and shape.
STOCK_ROWS = {
    "stock": (1, MOST_ROWS),
    "stock-split": (1, 5),
    "stock-padded": (2, 11),
    "stock-padded-5": (2, 5),
}
SLICES = {"metal-split": 4, "metal-columns": 1}  # simdgroups that split k, by the name of a kernel
NO_SCALES = "static_cast<const device T*>(nullptr)"
SIMDGROUPS = {4: 4, 1: 2}  # of a threadgroup, by slices
LEAST = 8  # elements: MLX passes smaller arrays in another address space


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
    if weights.weight.size < LEAST:
        return f"fewer than {LEAST} words of weights"
    if weights.scales is None:
        fits = weights.weight.dtype == dtype and dtype != mx.float32 and weights.inputs % VALUES == 0
        return None if fits else "weights are not of the activations' 16-bit type, in multiples of 16"
    if weights.mode != "affine" or weights.scales.dtype != dtype:
        return "not quantised in the affine mode with scales of the activations' type"
    if weights.bits not in (4, 8) or weights.group not in (32, 64, 128):
        return f"{weights.bits} bits in groups of {weights.group}"
    return None


def metal_products(
    x: mx.array,
    weights: list[MatrixWeights],
    slices: int,
    *,
    gated: bool = False,
    norm: tuple[mx.array, float] | None = None,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """Return x [..., K] by every weight [N, K], in one launch. All have the same K, bits and group size.

    Args:
        gated: Return the silu of the first product times the second.
        norm: The weight [K] and epsilon of a norm of x.
        residual: What is added to the only product.
    """
    rows = prod(x.shape[:-1])
    pass_rows = next((size for size in ROWS if rows <= size), ROWS[-1])
    how = Form(gated, None if norm is None else norm[1], residual is not None)
    kernel = _product_kernel(len(weights), weights[0].scales is not None, slices, how)
    extra = [*([] if norm is None else [norm[0]]), *([] if residual is None else [residual])]
    passes = -(-rows // pass_rows)
    return launch_multiply(kernel, x, extra, weights, slices, passes, pass_rows, x.shape[:-1], gated=gated)


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


class Form(NamedTuple):
    """What a product does besides."""

    gated: bool = False
    eps: float | None = None  # of the norm of its input
    adds: bool = False


PLAIN = Form()


@cache
def _product_kernel(count: int, quantised: bool, slices: int, form: Form = PLAIN) -> Any:
    source = multiply(START, count, quantised, slices, axis=0, form=form)
    extra = [*["norm_weight"] * (form.eps is not None), *["residual"] * form.adds]
    names = ("x", *extra, *weight_names(count, quantised))
    outputs = tuple(f"out{i}" for i in range(1 if form.gated else count))
    return metal_kernel("product", names, outputs, source, "products")


def multiply(
    start: str, count: int, quantised: bool, slices: int, axis: int, expert: str = "0", form: Form = PLAIN
) -> str:
    """Return `start` and the code that multiplies by `expert` of the weights: threadgroups count through the outputs
    of all, or of both together where they are gated."""
    gated, norms = form.gated, form.eps is not None
    span, each = _span(slices, gated), OUTPUTS // 2 if gated else OUTPUTS
    simdgroup = "int(simdgroup_index_in_threadgroup)"
    slice_, offset = (simdgroup, "0") if slices > 1 else ("0", f"{each} * {simdgroup}")
    memory = [f"sums[{slices * OUTPUTS} * PASS_ROWS]"] * (slices > 1) + ["parts[8 * PASS_ROWS]"] * norms
    declared = f"threadgroup float {', '.join(memory)};" if memory else ""
    flags = ", ".join(str(each).lower() for each in (gated, norms, form.adds))
    # One body for all: which weights it has is chosen first, so that it takes no more registers than for one.
    pointers = [("w", f"const device {'uint32_t' if quantised else 'T'}*"), ("out", "device T*")]
    pointers += [(name, "const device T*") for name in ("s", "b")] * quantised
    first = [f"{kind} {name} = {name}0;" for name, kind in pointers]
    code = [
        f"{declared}{start}const int K = x_shape[x_ndim - 1];\nint tile = int(threadgroup_position_in_grid.y);",
        f"int N = w0_shape[{axis}], words = w0_shape[{axis + 1}];",
        *first,
        "float scales[PASS_ROWS];",
    ]
    if norms:
        code.append(f"""
          headstart::row_scales<PASS_ROWS, {SIMDGROUPS[slices]}>(
              x, inputs, K, {form.eps!r}f, parts, scales, {simdgroup}, int(thread_index_in_simdgroup));""")
    beside = 1 if gated else count
    for i in range(1, beside):  # nested: each looks at what is left of the tiles
        tiles, others = f"(N + {span - 1}) / {span}", " ".join(f"{name} = {name}{i};" for name, _ in pointers)
        code.append(f"if (tile >= {tiles}) {{ tile -= {tiles}; N = w{i}_shape[{axis}];")
        code.append(f"words = w{i}_shape[{axis + 1}]; {others}")

    def matrix(i: str) -> str:
        scales = f"s{i} + at * (K / GROUP), b{i} + at * (K / GROUP)"
        return f"w{i} + at * words, {scales if quantised else ', '.join([NO_SCALES] * 2)}"

    code.append(f"""{"}" * (beside - 1)}
      const long at = static_cast<long>({expert}) * N;
      headstart::product<T, BITS, GROUP, PASS_ROWS, {slices}, {flags}>(
          x, {matrix("")}, {matrix("1" if gated else "")}, out, N, K, tile * {span} + {offset}, inputs, outputs,
          {"norm_weight" if norms else "static_cast<const device float*>(nullptr)"}, scales,
          {"residual" if form.adds else NO_SCALES},
          {"sums" if slices > 1 else "static_cast<threadgroup float*>(nullptr)"}, {slice_},
          int(thread_index_in_simdgroup));""")
    return "\n".join(code)


def _span(slices: int, gated: bool) -> int:
    """Return the outputs of a threadgroup."""
    return OUTPUTS * SIMDGROUPS[slices] // slices // (2 if gated else 1)


def _pad(array: mx.array) -> mx.array:
    """Return an array, or as many elements of it as are not too few: scales of a model as small as a test's."""
    return array if array.size >= LEAST else mx.pad(array.reshape(-1), (0, LEAST - array.size))


def launch_multiply(
    kernel: Any,
    x: mx.array,
    extra: list[mx.array],
    weights: list[MatrixWeights],
    slices: int,
    passes: int,
    pass_rows: int,
    shape: tuple[int, ...],
    *,
    gated: bool = False,
) -> list[mx.array]:
    """Run a kernel with `multiply` in it → [*shape, N] for every weight, or of two where they are `gated`."""
    threads, first, span = 32 * SIMDGROUPS[slices], weights[0], _span(slices, gated)
    made_of = weights[:1] if gated else weights
    made: list[mx.array] = kernel(
        inputs=[x, *extra, *(_pad(array) for each in weights for array in each.arrays())],
        template=[("T", x.dtype), ("BITS", first.bits), ("GROUP", first.group), ("PASS_ROWS", pass_rows)],
        grid=(threads * passes, sum(-(-each.outputs // span) for each in made_of), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*shape, each.outputs) for each in made_of],
        output_dtypes=[x.dtype] * len(made_of),
    )
    return made
