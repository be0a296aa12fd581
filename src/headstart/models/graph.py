"""A pass over a decoding window as one compiled graph, from arrays to arrays.

A step of a large model is a thousand operations. On CUDA the host needs longer to describe them one by one than the
device to run them; `mx.compile` remembers the description, one for every (rows, width, pending drafts, capacity). To
remember takes twice as long as to describe once, so a shape is remembered when it is seen again.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..kernels.cuda import on_cuda
from ..kernels.cuda.persistent import PERSISTENT
from ..limits import MAX_K
from ..state import BLOCK, KV, BatchState, Recurrent

OFTEN = 1  # times that a shape is described before it is remembered
MOST = 512  # shapes; then all are forgotten, since a long text has a new capacity again and again


def compiles(width: int) -> bool:
    """Return whether a pass of this width is remembered: a window's is, a prompt's chunks have too many widths."""
    return on_cuda() and width <= MAX_K + 1


class Graph:
    """`run(rows, *inputs)`, which may change what `rows` holds but not its lengths, and returns arrays."""

    def __init__(self, run: Callable[..., Any]):
        self.run = run
        self.kinds: list[type[KV] | type[Recurrent]] = []
        self.seen: Counter[Any] = Counter()
        self.traced = mx.compile(self._from_arrays)

    def __call__(self, rows: BatchState, *inputs: Any) -> Any:
        """Run the graph. `rows` must have room for the window already: a graph cannot grow what it is given."""
        shapes = [each.shape if isinstance(each, mx.array) else each for each in inputs]
        shape = (
            rows.capacity,
            rows.shift is None,
            rows.adapters is None,
            *shapes,
            *(array.shape for array in rows.layers[0].arrays()),
        )
        if len(self.seen) >= MOST and shape not in self.seen:
            self.seen.clear()
            self.traced = mx.compile(self._from_arrays)
        self.seen[shape] += 1
        if self.seen[shape] <= OFTEN:
            return self.run(rows, *inputs)
        self.kinds = [type(memory) for memory in rows.layers]
        held = [memory.arrays() for memory in rows.layers]
        fused = PERSISTENT.claim()  # or not any more: another description
        status = PERSISTENT.status
        given = [status, rows.lengths, rows.accepted, rows.shift, rows.adapters, held, fused, *inputs]
        try:
            output, held, status = self.traced(*given)
        finally:
            PERSISTENT.status = status
        rows.layers = [kind.of(arrays) for kind, arrays in zip(self.kinds, held, strict=True)]
        return output

    def _from_arrays(
        self,
        status: mx.array,
        lengths: mx.array,
        accepted: mx.array,
        shift: mx.array | None,
        adapters: mx.array | None,
        held: list[list[mx.array]],
        fused: bool,
        *inputs: Any,
    ) -> tuple[Any, list[list[mx.array]], mx.array]:
        layers = [kind.of(arrays) for kind, arrays in zip(self.kinds, held, strict=True)]
        rows = BatchState(layers, lengths, accepted, shift=shift, adapters=adapters)
        # Where the rows end changes from step to step; that all of the capacity is in reach does not.
        rows.bounds = [rows.capacity - BLOCK // 8] * lengths.shape[0]
        PERSISTENT.status = status
        output = self.run(rows, *inputs)
        return output, [memory.arrays() for memory in rows.layers], PERSISTENT.status
