"""Integers of a step in memory from which the host reads them fast, and whether a kernel gave up."""

from collections.abc import Sequence

import mlx.core as mx

from ...errors import KernelTimeout
from ..report import Report, join_columns
from .greedy import launch_columns
from .persistent import Persistent


class CudaReport(Report):
    """A few integers are pairs: MLX keeps 8 bytes where both can reach them. The page of a larger array moves to the
    host that reads it, and a kernel that writes there again waits for it."""

    def __init__(self, columns: Sequence[mx.array], persistent: Persistent):
        status = persistent.own_status()
        given_up = mx.array([[0]], mx.int32) if status is None else status[None, :1]
        columns = [*columns, given_up]
        self.persistent = persistent
        self.rows, self.width = max(each.shape[0] for each in columns), sum(each.shape[1] for each in columns)
        plain = all(each.dtype == mx.int32 for each in columns)
        self.arrays = launch_columns(columns, for_host=True) if plain else [join_columns(columns)]

    def read(self) -> list[list[int]]:
        """Wait for the numbers.

        Raises:
            KernelTimeout: They are void, because the blocks of a persistent kernel did not run together.
        """
        lines = super().read() if len(self.arrays) == 1 else self._read_pairs()
        if any(given_up for *_, given_up in lines):
            self.persistent.give_up("a kernel waited over 100 ms for its own blocks")
            raise KernelTimeout("a kernel gave up; the step is computed again by others")
        return [line[:-1] for line in lines]

    def _read_pairs(self) -> list[list[int]]:
        pairs: list[list[int]] = [pair.tolist() for pair in self.arrays]  # type: ignore[misc]
        numbers = [number for pair in pairs for number in pair]
        return [numbers[row * self.width : (row + 1) * self.width] for row in range(self.rows)]
