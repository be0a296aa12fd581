"""The best tokens of logits, and small arrays of integers: cuda or stock ops."""

import mlx.core as mx

from .cuda import on_cuda
from .cuda.greedy import best_fits, launch_best, launch_columns


def best_tokens(logits: mx.array) -> mx.array:
    """Return the argmax [...] of logits [..., V], int32."""
    return launch_best(logits).tokens if best_fits(logits) else mx.argmax(logits, axis=-1).astype(mx.int32)


def join_columns(arrays: list[mx.array], read_by_host: bool = False) -> mx.array:
    """Return integers [B, ...] side by side; an array that is [1, ...] has the same for all rows. `read_by_host` says
    whether the host will read them."""
    if len(arrays) == 1:
        return arrays[0]
    if on_cuda() and all(each.dtype == mx.int32 for each in arrays):
        return launch_columns(arrays, read_by_host)
    rows = max(each.shape[0] for each in arrays)
    return mx.concatenate([mx.broadcast_to(each, (rows, each.shape[1])) for each in arrays], axis=1)


def in_device_memory(counters: mx.array) -> mx.array:
    """Return integers [B] in memory that kernels read fast. What MLX's own operations make of a few sequences lies in
    memory that is shared with the host."""
    if not on_cuda() or counters.dtype != mx.int32:
        return counters
    return launch_columns([counters[:, None]]).reshape(-1)
