"""The best tokens of logits, and integers side by side: cuda or stock ops."""

import mlx.core as mx

from .cuda import on_cuda
from .cuda.greedy import best_fits, launch_best, launch_columns


def best_tokens(logits: mx.array) -> mx.array:
    """Return the argmax [...] of logits [..., V], int32."""
    return launch_best(logits).tokens if best_fits(logits) else mx.argmax(logits, axis=-1).astype(mx.int32)


def join_columns(arrays: list[mx.array]) -> mx.array:
    """Return integers [B, ...] side by side; an array that is [1, ...] has the same for all rows."""
    if len(arrays) == 1:
        return arrays[0]
    if on_cuda() and all(each.dtype == mx.int32 for each in arrays):
        return launch_columns(arrays)
    rows = max(each.shape[0] for each in arrays)
    return mx.concatenate([mx.broadcast_to(each, (rows, each.shape[1])) for each in arrays], axis=1)
