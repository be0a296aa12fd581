"""Products with experts, for a few rows: as in `products`, with every row's experts chosen by index.

mlx's `gather_qmm` reads an expert's weights again for every row that chose it, and sums in an order that changes with
the number of rows. Ours takes the rows that share an expert together (see experts.cu).
"""

from functools import cache
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from . import cpu
from .cuda import include, on_cuda
from .products import (
    MOST_ROWS,
    RUN,
    Order,
    Tile,
    Weights,
    choose,
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
    if (native := cpu.native()) is not None:
        return cpu.products(native, x, layers, experts=indices, own=x.ndim > indices.ndim)
    found = [weights_of(layer) for layer in layers]
    if not on_cuda() or prod(indices.shape[:-1]) > MOST_ROWS or any(refusal(x.dtype, w) for w in found):
        return None
    if len({Order.of(weights) for weights in found}) > 1:
        return [launch(x, indices, [weights])[0] for weights in found]
    return launch(x, indices, found)


def swiglu_experts(x: mx.array, indices: mx.array, gate: nn.Module, up: nn.Module) -> mx.array | None:
    """`silu(gate) * up` of each expert in `indices` [..., E]: [..., K] → [..., E, N]; None as in `experts`."""
    if (native := cpu.native()) is not None:
        made = cpu.products(native, x, (gate, up), gated=True, experts=indices)
        return made[0] if made else None
    both = experts(x, indices, gate, up)
    return None if both is None else swiglu(*both)


def route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    """The `top` experts of a row by its logits [..., E], and their scores: [..., top] each.

    One kernel on CUDA: the order in which stock ops name the experts, and whom they choose among equals, may change
    with the number of rows.
    """
    if not on_cuda() or logits.dtype not in (mx.bfloat16, mx.float16) or logits.shape[-1] > 1024:
        gates = mx.softmax(logits, axis=-1, precise=True)
        indices = mx.argpartition(gates, kth=-top, axis=-1)[..., -top:]
        scores = mx.take_along_axis(gates, indices, axis=-1)
        return indices, scores / scores.sum(axis=-1, keepdims=True) if normed else scores
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
    tile = Tile(16 if pairs <= 128 else 64, 8)
    tiles = sum(-(-each.outputs // tile.height) for each in weights)
    shared = shared_bytes(weights[0], order, tile, several=False)
    return kernel(len(weights), order, tile, shared, x.size // x.shape[-1] == pairs)(
        inputs=[x, indices.astype(mx.uint32), *(array for each in weights for array in each.arrays())],
        template=template(x.dtype, weights[0], order, tile),
        grid=(pairs * 32 * order.slices, tiles, 1),
        threadgroup=(32 * order.slices, 1, 1),
        output_shapes=[(*indices.shape, each.outputs) for each in weights],
        output_dtypes=[x.dtype] * len(weights),
    )


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
def kernel(count: int, order: Order, tile: Tile, shared: int, own_inputs: bool) -> Any:
    quantised = order.bits < 16
    share = f"  const int share = {'1' if own_inputs else 'top'};\n"
    return mx.fast.cuda_kernel(
        name=f"experts_{count}_{'each' if own_inputs else 'shared'}{large(shared)}",
        input_names=["x", "indices", *names(count, quantised)],
        output_names=[f"out{i}" for i in range(count)],
        header=include("tensor_core", "products", "experts"),
        source=PAIRS + choose(count, quantised, axis=1, move=MOVE) + share + RUN,
        shared_memory=shared,
    )


@cache
def _route(normed: bool) -> Any:
    return mx.fast.cuda_kernel(
        name=f"route{'_normed' * normed}",
        input_names=["logits"],
        output_names=["indices", "scores"],
        header=include("experts"),
        source=f"""
            const int row = blockIdx.x;
            headstart::route<T, E, TOP>(
                logits + row * E, {str(normed).lower()}, indices + row * TOP, scores + row * TOP);
        """,
    )


@cache
def _combine() -> Any:
    return mx.fast.cuda_kernel(
        name="combine_experts",
        input_names=["parts", "scores", "shared", "gate"],
        output_names=["out"],
        header=include("experts"),
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
