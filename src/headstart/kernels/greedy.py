"""Find the best tokens of logits and join small arrays of integers: cuda or stock ops."""

from typing import NamedTuple

import mlx.core as mx

from .cuda import on_cuda
from .cuda.greedy import best_fits, launch_best, launch_columns, launch_starts


def best_tokens(logits: mx.array) -> mx.array:
    """Return the argmax [...] of logits [..., V], int32."""
    return launch_best(logits).tokens if best_fits(logits) else mx.argmax(logits, axis=-1).astype(mx.int32)


def join_columns(arrays: list[mx.array]) -> mx.array:
    """Return integers [B, ...] side by side; an array that is [1, ...] has the same for all rows."""
    if len(arrays) == 1:
        return arrays[0]
    if on_cuda() and all(each.dtype == mx.int32 for each in arrays):
        return launch_columns(arrays)[0]
    rows = max(each.shape[0] for each in arrays)
    return mx.concatenate([mx.broadcast_to(each, (rows, each.shape[1])) for each in arrays], axis=1)


def draft_starts(lengths: mx.array, counts: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return for sequences of `lengths` [B] that are given `counts` [B] pairs: the index of the last of these, 0
    without any, [B]; and where k drafts begin, [k, B]."""
    if on_cuda():
        return launch_starts(lengths, counts, k)
    return mx.maximum(counts - 1, 0), lengths + counts + mx.arange(k)[:, None]


class Report(NamedTuple):
    """Hold integers [rows, width] for the host.

    On CUDA a few are pairs: MLX keeps 8 bytes where both can reach them. The page of a larger array moves to the host
    that reads it, and a kernel that writes there again waits for it.
    """

    arrays: list[mx.array]
    rows: int
    width: int

    @classmethod
    def of(cls, arrays: list[mx.array]) -> "Report":
        """Return integers [B, ...] side by side, as in `join_columns`."""
        rows, width = max(each.shape[0] for each in arrays), sum(each.shape[1] for each in arrays)
        cuda = on_cuda() and all(each.dtype == mx.int32 for each in arrays)
        return cls(launch_columns(arrays, for_host=True) if cuda else [join_columns(arrays)], rows, width)

    def read(self) -> list[list[int]]:
        """Wait for the numbers."""
        if len(self.arrays) == 1:
            return self.arrays[0].tolist()  # type: ignore[return-value]
        pairs: list[list[int]] = [pair.tolist() for pair in self.arrays]  # type: ignore[misc]
        numbers = [number for pair in pairs for number in pair]
        return [numbers[row * self.width : (row + 1) * self.width] for row in range(self.rows)]


def in_device_memory(counters: mx.array) -> mx.array:
    """Return integers [B] in memory that kernels read fast. What MLX's own operations make of a few sequences lies in
    memory that is shared with the host."""
    if not on_cuda() or counters.dtype != mx.int32:
        return counters
    return launch_columns([counters[:, None]])[0].reshape(-1)
