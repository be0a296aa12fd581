"""Products with experts, for a few rows: as in `products`, with every row's experts chosen by index.

mlx's `gather_qmm` reads an expert's weights again for every row that chose it, and sums in an order that changes with
the number of rows. Ours takes the rows that share an expert together (see experts.cu).
"""

from functools import cache
from typing import Any

import mlx.core as mx

from .device import launch, make_kernel
from .products import (
    RUN,
    MatrixWeights,
    ProductTile,
    SumOrder,
    choose_weights,
    name_suffix,
    product_template,
    shared_bytes,
    weight_names,
)


def launch_experts(x: mx.array, indices: mx.array, weights: list[MatrixWeights]) -> list[mx.array]:
    pairs, order = indices.size, SumOrder.of(weights[0])
    # Pairs that share an expert are few; where there are many pairs, larger tiles leave fewer blocks without work.
    tile = ProductTile(16 if pairs <= 128 else 64, 8)
    tiles = sum(-(-each.outputs // tile.height) for each in weights)
    shared = shared_bytes(weights[0], order, tile, several=False)
    return launch(
        experts_kernel(len(weights), order, tile, shared, x.size // x.shape[-1] == pairs),
        [x, indices.astype(mx.uint32), *(array for each in weights for array in each.arrays())],
        product_template(x.dtype, weights[0], order, tile),
        (pairs, tiles, 1),
        32 * order.slices,
        [((*indices.shape, each.outputs), x.dtype) for each in weights],
    )


def launch_route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    """Return the `top` experts of a row by its logits [..., E], and their scores: [..., top] each."""
    experts, shape = logits.shape[-1], (*logits.shape[:-1], top)
    template = {"T": logits.dtype, "E": experts, "TOP": top}
    outputs = [(shape, mx.uint32), (shape, logits.dtype)]
    indices, scores = launch(_route(normed), [logits], template, (logits.size // experts, 1, 1), 32, outputs)
    return indices, scores


def launch_combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """Sum what experts made [..., E, N] by their scores [..., E], and what all rows share [..., N] by the sigmoid of
    its gate [..., 1], in float32 to the end."""
    inputs = [parts, scores.astype(parts.dtype), shared, gate]
    blocks = (-(-shared.size // 256), 1, 1)
    return launch(_combine(), inputs, {"T": parts.dtype}, blocks, 256, [(shared.shape, parts.dtype)])[0]


PAIRS = """
  __shared__ int found[COLUMNS];
  const int pair = blockIdx.x, top = indices_shape[indices_ndim - 1];
  int pairs = top * indices_shape[0] * (indices_ndim > 2 ? indices_shape[1] : 1);
  if (!headstart::gather_pairs<COLUMNS>(indices, pairs, pair, found)) return;
  const long long expert = indices[pair];
  auto outputs = [&](int column) { return found[column]; };
"""
MOVE = """
    part.w = static_cast<const char*>(part.w) + expert * part.N * (K / 8 * BITS);
    if (BITS < 16) part.scales += expert * part.N * (K / GROUP), part.biases += expert * part.N * (K / GROUP);
"""


@cache
def experts_kernel(count: int, order: SumOrder, tile: ProductTile, shared: int, own_inputs: bool) -> Any:
    quantised = order.bits < 16
    share = f"  const int share = {'1' if own_inputs else 'top'};\n"
    name = f"experts_{count}_{'each' if own_inputs else 'shared'}{name_suffix(shared)}"
    inputs, outputs = f"x indices {weight_names(count, quantised)}", " ".join(f"out{i}" for i in range(count))
    source = PAIRS + choose_weights(count, quantised, axis=1, move=MOVE) + share + RUN
    return make_kernel(name, inputs, outputs, "tensor_core products experts", source, shared)


@cache
def _route(normed: bool) -> Any:
    call = f"""
        const int row = blockIdx.x;
        headstart::route<T, E, TOP>(
            logits + row * E, {str(normed).lower()}, indices + row * TOP, scores + row * TOP);
    """
    return make_kernel(f"route{'_normed' * normed}", "logits", "indices scores", "experts", call)


@cache
def _combine() -> Any:
    call = """
        const int top = scores_shape[scores_ndim - 1], N = shared_shape[shared_ndim - 1];
        const int rows = shared_shape[0] * (shared_ndim > 2 ? shared_shape[1] : 1);
        const int row = (blockIdx.x * 256 + threadIdx.x) / N, column = (blockIdx.x * 256 + threadIdx.x) % N;
        if (row < rows)
          out[row * N + column] = headstart::combined(
              parts + (long long)row * top * N + column, scores + row * top, top, N,
              shared[row * N + column], gate[row]);
    """
    return make_kernel("combine_experts", "parts scores shared gate", "out", "experts", call)
