"""Integers of a step, handed to the host."""

from collections.abc import Sequence

import mlx.core as mx


def join_columns(arrays: Sequence[mx.array]) -> mx.array:
    """Return integers [B, ...] side by side; an array that is [1, ...] has the same for all rows."""
    if len(arrays) == 1:
        return arrays[0]
    rows = max(each.shape[0] for each in arrays)
    return mx.concatenate([mx.broadcast_to(each, (rows, each.shape[1])) for each in arrays], axis=1)


class Report:
    """Integers [rows, width]. `arrays` are to be evaluated before they are read."""

    def __init__(self, columns: Sequence[mx.array]):
        """Take integers [B, ...], as `join_columns` does."""
        self.arrays = [join_columns(columns)]

    def read(self) -> list[list[int]]:
        """Wait for the numbers."""
        return self.arrays[0].tolist()  # type: ignore[return-value]
