"""The parts of a mixture of experts on Metal: see `experts.metal`."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..weights import MatrixWeights, weight_names
from .device import metal_kernel, type_name
from .products import Body, lanes_body, launch_multiply, multiply

PAIR_ROWS = 4  # rows that share an expert, side by side


def metal_experts(x: mx.array, indices: mx.array, weights: list[MatrixWeights]) -> list[mx.array]:
    """Return x by the experts of each row's `indices` [..., E], for every weight [experts, N, K]: [..., E, N].

    x is [..., K], or [..., E, K] where each expert has an input of its own.
    """
    pairs = indices.size
    own = x.size // x.shape[-1] == pairs
    pass_rows = 1 if pairs == indices.shape[-1] else PAIR_ROWS  # a single row never takes an expert twice
    body = lanes_body(weights[0].inputs, pass_rows)
    kernel = _experts_kernel(len(weights), weights[0].scales is not None, own, body)
    chosen = [indices.astype(mx.uint32)]
    return launch_multiply(kernel, x, chosen, weights, body, pairs, indices.shape)


@cache
def _experts_kernel(count: int, quantised: bool, own: bool, body: Body) -> Any:
    start = f"""
      const int pair = int(threadgroup_position_in_grid.x);
      const int rows = 0, first_row = 0;  // of the norm
      int pairs = 1, inputs[PASS_ROWS], outputs[PASS_ROWS];
      for (int i = 0; i < indices_ndim; ++i) pairs *= indices_shape[i];
      if (!headstart::gather_pairs<PASS_ROWS>(indices, pairs, pair, outputs)) return;
      const int share = {"1" if own else "indices_shape[indices_ndim - 1]"};
      for (int r = 0; r < PASS_ROWS; ++r) inputs[r] = (outputs[r] < 0 ? pair : outputs[r]) / share;
    """
    source = multiply(start, count, quantised, body, axis=1, expert="indices[pair]")
    names = ("x", "indices", *weight_names(count, quantised))
    outputs = tuple(f"out{i}" for i in range(count))
    return metal_kernel("experts", names, outputs, source, "products", "experts")


def experts_per_token(module: nn.Module) -> int:
    """Return how many experts a token takes: mlx-lm's mixtures, or their routers, say it by one name or another."""
    said = vars(module) | vars(module.get("gate", module.get("router")))
    return int(said["top_k"] if "top_k" in said else said["num_experts_per_tok"])


def route_shape(logits: mx.array, top: int) -> str:
    return f"{top} of {logits.shape[-1]}, {type_name(logits.dtype)}"


def metal_route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    """Return the `top` experts of each row by its logits [..., E], and their scores: [..., top] each."""
    experts, shape = logits.shape[-1], (*logits.shape[:-1], top)
    source = f"""
        const int row = int(threadgroup_position_in_grid.x);
        headstart::route<T, E, TOP>(logits + row * E, {str(normed).lower()}, indices + row * TOP,
                                    scores + row * TOP, int(thread_index_in_simdgroup));
    """
    indices, scores = metal_kernel("route", ("logits",), ("indices", "scores"), source, "experts")(
        inputs=[logits],
        template=[("T", logits.dtype), ("E", experts), ("TOP", top)],
        grid=(logits.size // experts * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape, shape],
        output_dtypes=[mx.uint32, logits.dtype],
    )
    return indices, scores


def combine_shape(parts: mx.array) -> str:
    return f"{parts.shape[-2]} of {parts.shape[-1]}, {type_name(parts.dtype)}"


def metal_combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """Sum what experts made [..., E, N] by their scores [..., E], and what all rows share [..., N] by the sigmoid of
    its gate [..., 1], in float32 to the end."""
    source = """
        const int top = scores_shape[scores_ndim - 1], N = shared_part_shape[shared_part_ndim - 1];
        const int element = int(thread_position_in_grid.x), row = element / N, column = element % N;
        out[element] = headstart::combine<T>(
            parts + static_cast<long>(row) * top * N + column, scores + row * top, top, N, shared_part[element],
            gate[row]);
    """
    inputs = ("parts", "scores", "shared_part", "gate")
    made: mx.array = metal_kernel("combine", inputs, ("out",), source, "experts")(
        inputs=[parts, scores.astype(parts.dtype), shared, gate],
        template=[("T", parts.dtype)],
        grid=(shared.size, 1, 1),
        threadgroup=(min(256, shared.size), 1, 1),
        output_shapes=[shared.shape],
        output_dtypes=[parts.dtype],
    )[0]
    return made
