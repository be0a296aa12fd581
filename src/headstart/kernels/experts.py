"""Products with experts, for a few rows: as in `products`, with every row's experts chosen by index.

mlx's `gather_qmm` reads an expert's weights again for every row that chose it, and sums in an order that changes with
the number of rows. Ours takes the rows that share an expert together (see experts.cu).
"""

from functools import cache
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cuda import TENSOR_CORE, on_cuda, source
from .products import (
    MOST_ROWS,
    RUN,
    Order,
    Tile,
    Weights,
    body,
    large,
    names,
    refusal,
    shared_bytes,
    template,
    weights_of,
)


def experts(x: mx.array, indices: mx.array, *layers: nn.Module) -> list[mx.array] | None:
    """Row by row what every expert of a row's `indices` [..., E] makes of it, for every layer: [..., E, N].

    `x` is [..., K], or [..., E, K] where each expert has an input of its own. None where a layer does not fit: call
    mlx-lm's, which for many rows sorts them first.
    """
    found = [weights_of(layer) for layer in layers]
    if not on_cuda() or prod(indices.shape[:-1]) > MOST_ROWS or any(refusal(x.dtype, w) for w in found):
        return None
    if len({Order.of(weights) for weights in found}) > 1:
        return [launch(x, indices, [weights])[0] for weights in found]
    return launch(x, indices, found)


def combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """What experts made [..., E, N] by their scores [..., E], and what all rows share [..., N] by its gate [..., 1].

    One kernel on CUDA, in float32 to the end: the order of a stock sum may change with the number of rows.
    """
    if not on_cuda() or parts.dtype not in (mx.bfloat16, mx.float16):
        return (parts * scores[..., None]).sum(axis=-2) + mx.sigmoid(gate) * shared
    return _combine()(
        inputs=[parts, scores.astype(parts.dtype), shared, gate],
        template=[("T", parts.dtype)],
        grid=(shared.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[shared.shape],
        output_dtypes=[parts.dtype],
    )[0]


def launch(x: mx.array, indices: mx.array, weights: list[Weights]) -> list[mx.array]:
    pairs, order = indices.size, Order.of(weights[0])
    # Pairs that share an expert are few; where there are many pairs, larger tiles leave fewer blocks without work.
    tile = Tile(1, 1) if pairs <= 128 else Tile(4, 1)
    blocks = sum(-(-each.outputs // (16 * tile.tall)) for each in weights)
    shared = shared_bytes(weights[0], order, tile)
    return kernel(len(weights), order, tile, shared, x.size // x.shape[-1] == pairs)(
        inputs=[x, indices.astype(mx.uint32), *(array for each in weights for array in each.arrays())],
        template=template(x.dtype, order, tile),
        grid=(pairs * 32 * order.warps, blocks, 1),
        threadgroup=(32 * order.warps, 1, 1),
        output_shapes=[(*indices.shape, each.outputs) for each in weights],
        output_dtypes=[x.dtype] * len(weights),
    )


PAIRS = """
  __shared__ int found[8 * WIDE];
  const int pair = blockIdx.x, top = indices_shape[indices_ndim - 1];
  int pairs = top * indices_shape[0] * (indices_ndim > 2 ? indices_shape[1] : 1);
  if (!headstart::gather_pairs<WIDE>(indices, pairs, pair, found)) return;
  const long long expert = indices[pair];
  auto outputs = [&](int column) { return found[column]; };
"""
OFFSET = """
  w = static_cast<const char*>(w) + expert * N * (K / 8 * BITS);
  if (BITS < 16) scales += expert * N * (K / GROUP), biases += expert * N * (K / GROUP);
"""


@cache
def kernel(count: int, order: Order, tile: Tile, shared: int, own_inputs: bool) -> Any:
    quantised = order.bits < 16
    share = f"\n  const int share = {'1' if own_inputs else 'top'};\n"
    return mx.fast.cuda_kernel(
        name=f"experts_{count}_{'each' if own_inputs else 'shared'}{large(shared)}",
        input_names=["x", "indices", *names(count, quantised)],
        output_names=[f"out{i}" for i in range(count)],
        header=TENSOR_CORE + source("products") + source("experts"),
        source=body(PAIRS, count, quantised, axis=1) + OFFSET + share + RUN,
        shared_memory=shared,
    )


@cache
def _combine() -> Any:
    return mx.fast.cuda_kernel(
        name="combine_experts",
        input_names=["parts", "scores", "shared", "gate"],
        output_names=["out"],
        header=source("experts"),
        source="""
            const int top = scores_shape[scores_ndim - 1], N = shared_shape[shared_ndim - 1];
            const int rows = shared_shape[0] * (shared_ndim > 2 ? shared_shape[1] : 1);
            const int row = (blockIdx.x * 256 + threadIdx.x) / N, column = (blockIdx.x * 256 + threadIdx.x) % N;
            if (row < rows)
              out[row * N + column] = headstart::combined(
                  parts + (long long)row * top * N + column, scores + row * top, top, N,
                  shared[row * N + column], gate[row]);
        """,
    )
