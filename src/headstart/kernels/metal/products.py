"""Products with weights for a few rows on Metal: see `products.metal` and `matrix.metal`."""

from collections.abc import Callable
from copy import copy
from functools import cache
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..products import stock_product
from ..weights import MatrixWeights, weight_names
from .choice import MOST_ROWS, WIDE_ROWS
from .device import has_matrix_units, metal_kernel, type_name

OUTPUTS, VALUES = 4, 16  # as in products.metal
LONG = 4 * 32 * VALUES  # inputs, from which on every lane of four simdgroups has some
COLUMNS, CHAINS, BLOCK = 32, 8, 32  # as in matrix.metal
ROWS = (1, 2, 4)  # side by side: with OUTPUTS of each, at most 16 sums in a thread's registers
CHAINED = (1, 2)  # rows that the units for matrices, which take 8, are too slow for
MATRICES = (8, 16)
TENSOR_ROWS = 16
MOST_FUSED = 4  # weights of a kernel
# Stock products whose rows are independent on some chips: the least and most rows that they compute at a time. MLX
# changes its kernel at 2 rows on M3 and newer, and at 6 to 33 by chip and shape.
STOCK_ROWS = {
    "stock": (1, MOST_ROWS),
    "stock-split": (1, 5),
    "stock-padded": (2, 11),
    "stock-padded-5": (2, 5),
}
NO_SCALES = "static_cast<const device T*>(nullptr)"
# Bytes of a matrix that are read to check it, more than chips cache; and outputs, where MLX takes no other kernel for
# more of them.
SAMPLED, LEAST_OUTPUTS = 128 << 20, 1 << 14
LEAST = 8  # elements: MLX passes smaller arrays in another address space


class Body(NamedTuple):
    """A function of ours that multiplies, and how it is launched."""

    function: str
    rows: int  # side by side
    simdgroups: int  # of a threadgroup
    outputs: int  # of a threadgroup, of all weights
    slices: int  # that a threadgroup adds up
    split: int  # the function's own parameter

    @property
    def sums(self) -> int:
        """How many sums a threadgroup keeps."""
        return self.slices * self.rows * self.outputs if self.slices > 1 else 0

    @property
    def headers(self) -> tuple[str, ...]:
        """The files that it is in."""
        return ("products", *{"product": (), "tensor_product": ("tensor",)}.get(self.function, ("matrix",)))


def most_rows(kernel: str) -> int:
    """Return how many rows a kernel is used for."""
    return WIDE_ROWS if kernel in KERNELS and kernel != "metal" else MOST_ROWS


def beside(count: int) -> int:
    """Return for how many weights there is a kernel that takes so many: three are four, of which one is left out."""
    return MOST_FUSED if count == MOST_FUSED - 1 else count


def lanes_body(inputs: int, rows: int) -> Body:
    """Return the kernel that splits k by lanes, and by simdgroups where it is long enough for all of them."""
    if inputs >= LONG:
        return Body("product", rows, 4, OUTPUTS, 4, 4)
    return Body("product", rows, 2, 2 * OUTPUTS, 1, 1)


def _lanes(inputs: int, rows: int) -> Body:
    return lanes_body(inputs, next((size for size in ROWS if rows <= size), ROWS[-1]))


def _matrices(simdgroups: int) -> Callable[[int, int], Body]:
    def body(inputs: int, rows: int) -> Body:
        if rows <= CHAINED[-1]:
            return Body("chained_product", rows, 2, COLUMNS, CHAINS, 2)
        size = next((size for size in MATRICES if rows <= size), MATRICES[-1])
        return Body("matrix_product", size, simdgroups, COLUMNS, CHAINS, simdgroups)

    return body


def _tensors(inputs: int, rows: int) -> Body:
    return Body("tensor_product", TENSOR_ROWS, 4, COLUMNS, 4, 4)


# Our kernels, by name: the function for so many inputs and rows.
KERNELS: dict[str, Callable[[int, int], Body]] = {
    "metal": _lanes,
    "metal-matrix": _matrices(8),
    "metal-matrix-4": _matrices(4),
    "metal-tensor": _tensors,
}
# Kernels for pipelines that take fewer threads than another's: they have the same bits, and are tried only then.
NARROWER = {"metal-matrix-4": "metal-matrix"}


def product_shape(dtype: mx.Dtype, layer: nn.Module, weights: MatrixWeights) -> str:
    """Return what a kernel is chosen by: the shape and type of the weights."""
    size = "×".join(str(length) for length in (*weights.weight.shape[:-1], weights.inputs))
    held = type_name(weights.weight.dtype)
    if weights.scales is not None:
        held = f"{weights.bits} bits in groups of {weights.group}"
    kind = ["not affine"] * (weights.mode != "affine") + ["biased"] * ("bias" in layer)
    return ", ".join([size, held, type_name(dtype), *kind])


def metal_refusal(dtype: mx.Dtype, layer: nn.Module, weights: MatrixWeights, kernel: str = "metal") -> str | None:
    """Return why a layer's weights do not fit a kernel; None if they do."""
    if "bias" in layer:
        return "it has a bias"
    if dtype not in (mx.bfloat16, mx.float16, mx.float32):
        return f"activations are {type_name(dtype)}"
    if kernel == "metal-tensor" and (dtype == mx.float32 or not has_matrix_units()):
        return "needs the matrix units of an M5, macOS 26.2 and 16 bits"
    if kernel != "metal" and weights.inputs % BLOCK:
        return f"inputs are no multiple of {BLOCK}"
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
    kernel: str,
    *,
    gated: bool = False,
    norm: tuple[mx.array, float] | None = None,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """Return x [..., K] by every weight [N, K], in one launch. All have the same K, bits and group size.

    Args:
        kernel: The name of one of `KERNELS`.
        gated: Return the silu of the first product times the second.
        norm: The weight [K] and epsilon of a norm of x.
        residual: What is added to the only product.
    """
    rows, spare = prod(x.shape[:-1]), beside(len(weights)) - len(weights)
    weights = [*weights, *weights[-1:] * spare]
    body = KERNELS[kernel](weights[0].inputs, rows)
    how = Form(gated, None if norm is None else norm[1], residual is not None)
    source = _product_kernel(len(weights), weights[0].scales is not None, body, how)
    extra = [*([] if norm is None else [norm[0]]), *([] if residual is None else [residual])]
    passes = -(-rows // body.rows)
    return launch_multiply(source, x, extra, weights, body, passes, x.shape[:-1], gated=gated, spare=spare)


def first_outputs(layer: nn.Module, weights: MatrixWeights) -> nn.Module:
    """Return a layer, or of a large one as many of its first outputs as are enough to time it."""
    each = sum(array.nbytes for array in weights.arrays()) // weights.outputs
    count = max(SAMPLED // max(each, 1), LEAST_OUTPUTS)
    if weights.outputs <= count:
        return layer
    part = copy(layer)
    part.update({name: array[:count] for name, array in layer.parameters().items()})
    return part


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
  const int first_row = int(threadgroup_position_in_grid.x) * PASS_ROWS;
  for (int r = 0; r < PASS_ROWS; ++r) {
    const int row = first_row + r;
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
def _product_kernel(count: int, quantised: bool, body: Body, form: Form = PLAIN) -> Any:
    source = multiply(START, count, quantised, body, axis=0, form=form)
    extra = [*["norm_weight"] * (form.eps is not None), *["residual"] * form.adds]
    names = ("x", *extra, *weight_names(count, quantised))
    outputs = tuple(f"out{i}" for i in range(1 if form.gated else count))
    return metal_kernel("product", names, outputs, source, *body.headers)


def multiply(
    start: str, count: int, quantised: bool, body: Body, axis: int, expert: str = "0", form: Form = PLAIN
) -> str:
    """Return `start`, which knows the rows, and the code that multiplies by `expert` of the weights: threadgroups
    count through the outputs of all, or of both together where they are gated."""
    gated, norms = form.gated, form.eps is not None
    span, simdgroup = _span(body, gated), "int(simdgroup_index_in_threadgroup), int(thread_index_in_simdgroup)"
    memory = [f"sums[{body.sums}]"] * (body.sums > 0) + [f"squares[{8 * body.rows}]"] * norms
    staged = ""
    if body.function == "tensor_product":
        memory.append(f"lines[{body.simdgroups * (body.rows + 2 * COLUMNS)}]")
        staged = f"tiles[{body.simdgroups * (body.rows + COLUMNS) * BLOCK}]"
    declared = f"threadgroup float {', '.join(memory)};" if memory else ""
    declared += f" threadgroup T {staged};" if staged else ""
    flags = ", ".join(str(each).lower() for each in (gated, norms, form.adds))
    # One body for all: which weights it has is chosen first, so that it takes no more registers than for one.
    pointers = [("w", f"const device {'uint32_t' if quantised else 'T'}*"), ("out", "device T*")]
    pointers += [(name, "const device T*") for name in ("s", "b")] * quantised
    first = [f"{kind} {name} = {name}0;" for name, kind in pointers]
    code = [
        f"{declared}{start}const int K = x_shape[x_ndim - 1];\nint tile = int(threadgroup_position_in_grid.y);",
        f"int N = w0_shape[{axis}], words = w0_shape[{axis + 1}];",
        *first,
    ]
    if norms:
        code.append(f"""
          headstart::sum_squares<PASS_ROWS, {body.simdgroups}>(x, rows, first_row, K, squares, {simdgroup});""")
    beside = 1 if gated else count
    for i in range(1, beside):  # nested: each looks at what is left of the tiles
        tiles, others = f"(N + {span - 1}) / {span}", " ".join(f"{name} = {name}{i};" for name, _ in pointers)
        code.append(f"if (tile >= {tiles}) {{ tile -= {tiles}; N = w{i}_shape[{axis}];")
        code.append(f"words = w{i}_shape[{axis + 1}]; {others}")

    def matrix(i: str) -> str:
        scales = f"s{i} + at * (K / GROUP), b{i} + at * (K / GROUP)"
        return f"w{i} + at * words, {scales if quantised else ', '.join([NO_SCALES] * 2)}"

    nothing = "static_cast<threadgroup float*>(nullptr)"
    code.append(f"""{"}" * (beside - 1)}
      const long at = static_cast<long>({expert}) * N;
      headstart::{body.function}<T, BITS, GROUP, PASS_ROWS, {body.split}, {flags}>(
          x, {matrix("")}, {matrix("1" if gated else "")}, out, N, K, tile * {span}, rows, first_row, inputs, outputs,
          {"norm_weight" if norms else "static_cast<const device float*>(nullptr)"},
          {"squares" if norms else nothing}, {form.eps if norms else 0.0!r}f,
          {"residual" if form.adds else NO_SCALES}, {"sums" if body.sums else nothing},
          {simdgroup}{", tiles, lines" if staged else ""});""")
    return "\n".join(code)


def _span(body: Body, gated: bool) -> int:
    """Return the outputs of a threadgroup that are stored."""
    return body.outputs // 2 if gated else body.outputs


def _pad(array: mx.array) -> mx.array:
    """Return an array, or as many elements of it as are not too few: scales of a model as small as a test's."""
    return array if array.size >= LEAST else mx.pad(array.reshape(-1), (0, LEAST - array.size))


def launch_multiply(
    kernel: Any,
    x: mx.array,
    extra: list[mx.array],
    weights: list[MatrixWeights],
    body: Body,
    passes: int,
    shape: tuple[int, ...],
    *,
    gated: bool = False,
    spare: int = 0,
) -> list[mx.array]:
    """Run a kernel with `multiply` in it → [*shape, N] for every weight, or of two where they are `gated`. By the
    last `spare` weights nothing is multiplied."""
    threads, first, span = 32 * body.simdgroups, weights[0], _span(body, gated)
    made_of = weights[:1] if gated else weights[: len(weights) - spare]
    made: list[mx.array] = kernel(
        inputs=[x, *extra, *(_pad(array) for each in weights for array in each.arrays())],
        template=[("T", x.dtype), ("BITS", first.bits), ("GROUP", first.group), ("PASS_ROWS", body.rows)],
        grid=(threads * passes, sum(-(-each.outputs // span) for each in made_of), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[*((*shape, each.outputs) for each in made_of), *[(LEAST,)] * spare],
        output_dtypes=[x.dtype] * (len(made_of) + spare),
    )
    return made[: len(made_of)]
