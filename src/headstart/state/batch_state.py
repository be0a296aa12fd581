"""State of a batch of sequences in one stack of layers (the trunk's or the head's), and how much of it is committed.

Lengths live on the device, where acceptance decides them. The host keeps an upper bound of each, so that it can
reserve capacity without waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import mlx.core as mx

from .foreign import Arrays
from .kv import BLOCK, KV, STRIDE, TokenPositions
from .recurrent import Recurrent


@dataclass
class BatchState:
    layers: list[Any]  # what each remembers: KV, Recurrent, or mlx-lm's own (`foreign.py`)
    lengths: mx.array  # [B] int32, committed tokens
    accepted: mx.array  # [B] int32, how many of the pending drafts were accepted
    bounds: list[int] = field(default_factory=list)  # the host's upper bounds of `lengths`
    shifts: list[int] = field(default_factory=list)  # from indices to RoPE's positions: images take up fewer of these
    shift: mx.array | None = None  # `shifts` [B], if one is not 0
    adapter_indices: list[int] = field(default_factory=list)  # of the sequences' adapters, -1 for none
    adapters: mx.array | None = None  # `adapter_indices` [B], if a sequence has one
    positions: TokenPositions | None = None  # of all tokens of the only sequence, during prefill around an image
    ends: mx.array | None = None  # [1, S], of all of these tokens: what layers with a window see ends before it

    def __post_init__(self) -> None:
        self.shifts = self.shifts or [0] * len(self.bounds)
        self.adapter_indices = self.adapter_indices or [-1] * len(self.bounds)

    @classmethod
    def empty(cls, layers: list[Any], rows: int) -> "BatchState":
        return cls(layers, mx.zeros((rows,), mx.int32), mx.zeros((rows,), mx.int32), [0] * rows)

    @property
    def kv_layers(self) -> list[KV]:
        return [layer for layer in self.layers if isinstance(layer, KV)]

    @property
    def recurrent_layers(self) -> list[Recurrent | Arrays]:
        return [layer for layer in self.layers if isinstance(layer, Recurrent | Arrays)]

    @property
    def capacity(self) -> int:
        return next((layer.capacity for layer in self.kv_layers), 0)

    def reserve(self, width: int) -> Callable[..., mx.array]:
        """Reserve `width` positions after every sequence's length, and point the layers there.

        Returns a function that makes the attention mask [B, 1, width, reach] for kernels that need one: a position
        sees everything up to itself, or with `window` only the last so many positions; and those of its image.
        """
        needed = max(self.bounds) + width
        if needed > self.capacity:
            for layer in self.kv_layers:
                layer.grow(_round_up(needed, BLOCK))
        reach = min(_round_up(needed, STRIDE), self.capacity)
        start = None if self.shift is None else self.lengths + self.shift
        positions = None
        if self.positions is not None:
            at = self.lengths[:, None, None] + mx.arange(width)  # [1, 1, W]
            ids = mx.take_along_axis(self.positions.ids, mx.broadcast_to(at, (1, 3, width)), axis=2)
            positions = self.positions._replace(ids=ids)
        ends = None
        if self.ends is not None:
            ends = mx.take_along_axis(self.ends, self.lengths[:, None] + mx.arange(width), axis=1)  # [1, W]
        for layer in self.kv_layers:
            layer.offset, layer.reach, layer.start, layer.positions = self.lengths, reach, start, positions
            layer.ends = ends
            if layer.every > 1:
                layer.offset, layer.reach = self.lengths // layer.every, -(-reach // layer.every)
            layer.begins = self.bounds[0] if len(self.bounds) == 1 else None

        lengths = self.lengths

        @cache
        def mask(window: int | None = None) -> mx.array:
            positions = (lengths[:, None] + mx.arange(width))[:, None, :, None]  # [B, 1, W, 1]
            seen = mx.arange(reach) <= positions
            if window is None:
                return seen
            if ends is not None:
                seen = mx.arange(reach) < ends[:, None, :, None]
            return seen & (mx.arange(reach) > positions - window)

        return mask

    def ahead(self, count: int, lengths: mx.array | None = None) -> "BatchState":
        """Return the same layers, `count` positions past every sequence's length: at `lengths` if they are known."""
        bounds = [bound + count for bound in self.bounds]
        return replace(self, lengths=self.lengths + count if lengths is None else lengths, bounds=bounds)

    def place(self, shifts: list[int], positions: TokenPositions | None = None, ends: mx.array | None = None) -> None:
        """Say where RoPE puts tokens from now on: at `shifts` from their indices, or at `positions`; and where what
        layers with a window see `ends`, if not after each token."""
        self.shifts, self.positions, self.ends = shifts, positions, ends
        self.shift = mx.array(shifts, mx.int32) if any(shifts) else None

    def adapt(self, indices: list[int]) -> None:
        """Say which of the model's adapters every sequence has, -1 for none."""
        self.adapter_indices = indices
        self.adapters = mx.array(indices, mx.int32) if max(indices, default=-1) >= 0 else None

    def commit(self, count: mx.array, most: int, lengths: mx.array | None = None) -> None:
        """Advance every sequence by its `count` [B] tokens, to `lengths` if they are known. The host knows only that
        it is `most` or less."""
        self.lengths = self.lengths + count if lengths is None else lengths
        self.bounds = [bound + most for bound in self.bounds]

    def keep(self, rows: list[int]) -> None:
        """Keep only these sequences, with the capacity that the longest of them may need."""
        index = mx.array(rows, mx.int32)
        self.bounds = [self.bounds[row] for row in rows]
        capacity = _round_up(max(self.bounds, default=0), BLOCK)
        for layer in self.layers:
            if isinstance(layer, KV):
                layer.keep(index, capacity)
            else:
                layer.keep(index)
        self.lengths, self.accepted = self.lengths[index], self.accepted[index]
        self.place([self.shifts[row] for row in rows])
        self.adapt([self.adapter_indices[row] for row in rows])

    def join(self, other: "BatchState") -> None:
        """Append the sequences of `other`."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)  # the same layer of the same model
        self.lengths = mx.concatenate([self.lengths, other.lengths])
        self.accepted = mx.concatenate([self.accepted, other.accepted])
        self.bounds = self.bounds + other.bounds
        self.place(self.shifts + other.shifts)
        self.adapt(self.adapter_indices + other.adapter_indices)

    def arrays(self) -> list[mx.array]:
        return [self.lengths, self.accepted, *(a for layer in self.layers for a in layer.arrays())]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
