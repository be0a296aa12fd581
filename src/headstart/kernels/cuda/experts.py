"""Products with experts, for a few rows: as in `products`, with every row's experts chosen by index.

mlx's `gather_qmm` reads an expert's weights again for every row that chose it, and sums in an order that changes with
the number of rows. Ours takes the rows that share an expert together (see experts.cu).
"""

from functools import cache
from typing import Any

import mlx.core as mx

from ..weights import MatrixWeights
from .compiler import cuda_kernel
from .device import include
from .formats import arrays_of
from .products import PARTS, RUN, ProductTile, SumOrder, matrices, name_suffix, product_template, shared_bytes


def launch_experts(
    x: mx.array, indices: mx.array, weights: list[MatrixWeights], gated: bool = False
) -> list[mx.array]:
    """Multiply x [..., K], or [..., top, K], by the experts in `indices` [..., top] of every weight [E, N, K].

    `gated` is as in `launch_products`.
    """
    pairs, order = indices.size, SumOrder.of(weights[0])
    # Pairs that share an expert are few; where there are many pairs, larger tiles leave fewer blocks without work.
    tile = ProductTile((32 if gated else 16) if pairs <= 128 else 64, 8)
    tiles = sum(-(-each.outputs // tile.height) for each in weights)
    shared = shared_bytes(weights[0], order, tile, tile.stages(order.chunks(weights[0])), several=False)
    made = weights[:1] if gated else weights
    return experts_kernel(len(weights), gated, order, shared, x.size // x.shape[-1] == pairs)(
        inputs=[x, indices.astype(mx.uint32), *(array for each in weights for array in arrays_of(each))],
        template=product_template(x.dtype, weights, order, tile, gated),
        grid=(pairs * 32 * order.slices, tiles, 1),
        threadgroup=(32 * order.slices, 1, 1),
        output_shapes=[(*indices.shape, each.outputs) for each in made],
        output_dtypes=[x.dtype] * len(made),
    )


def launch_route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    """Return the `top` experts of a row by its logits [..., E], and their scores: [..., top] each."""
    experts, shape = logits.shape[-1], (*logits.shape[:-1], top)
    indices, scores = _route(normed)(
        inputs=[logits],
        template=[("T", logits.dtype), ("E", experts), ("TOP", top)],
        grid=(logits.size // experts * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[mx.uint32, logits.dtype],
    )
    return indices, scores


def launch_combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """Sum what experts made [..., E, N] by their scores [..., E], and what all rows share [..., N] by the sigmoid of
    its gate [..., 1], in float32 to the end."""
    made: mx.array = _combine()(
        inputs=[parts, scores.astype(parts.dtype), shared, gate],
        template=[("T", parts.dtype)],
        grid=(shared.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[shared.shape],
        output_dtypes=[parts.dtype],
    )[0]
    return made


PAIRS = """
  __shared__ int found[COLUMNS];
  const int pair = blockIdx.x, top = indices_shape[indices_ndim - 1];
  int pairs = top * indices_shape[0] * (indices_ndim > 2 ? indices_shape[1] : 1);
  if (!headstart::gather_pairs<COLUMNS>(indices, pairs, pair, found)) return;
  const unsigned expert = indices[pair];
  auto outputs = [&](int, int column) { return found[column]; };
  auto choose = [&](int tile) {
    auto part = headstart::tile_of<HEIGHT / 16, WHOLE>(matrices, tile);
    headstart::move_to_expert<F>(part, x_shape[x_ndim - 1], expert);
    return part;
  };
"""


@cache
def experts_kernel(count: int, gated: bool, order: SumOrder, shared: int, own_inputs: bool) -> Any:
    share = f"  const int share = {'1' if own_inputs else 'top'};\n"
    return cuda_kernel(
        name=f"experts_{'gated' if gated else count}_{'each' if own_inputs else 'shared'}{name_suffix(shared)}",
        input_names=["x", "indices", *(name for i in range(count) for name in order.format.names(i).values())],
        output_names=[f"out{i}" for i in range(1 if gated else count)],
        header=include(*PARTS, "experts"),
        source=matrices(count, gated, order.format, axis=1) + PAIRS + share + RUN,
        shared_memory=shared,
    )


@cache
def _route(normed: bool) -> Any:
    return cuda_kernel(
        name=f"route{'_normed' * normed}",
        input_names=["logits"],
        output_names=["indices", "scores"],
        header=include(*PARTS, "experts"),
        source=f"""
            const int row = blockIdx.x;
            headstart::choose<T, E, TOP>(logits + row * E, indices + row * TOP);
            __syncwarp();
            headstart::score<T, E, TOP>(
                logits + row * E, indices + row * TOP, {str(normed).lower()}, scores + row * TOP);
        """,
    )


@cache
def _combine() -> Any:
    return cuda_kernel(
        name="combine_experts",
        input_names=["parts", "scores", "shared", "gate"],
        output_names=["out"],
        header=include(*PARTS, "experts"),
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
