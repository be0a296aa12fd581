"""KV cache of one attention layer, for sequences of different lengths.

Every sequence writes at its own length, and lengths advance only by accepted tokens. What a rejected draft wrote lies
beyond the length: it is masked, and the next window overwrites it. Rollback costs nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

BLOCK = 256  # positions; capacity grows by whole blocks
STRIDE = 64  # positions; attention reads whole strides, as few as hold every sequence


class TokenPositions(NamedTuple):
    """Where RoPE puts tokens: those of an image are at a time, a row and a column, and do not follow one another."""

    ids: mx.array  # [B, 3, W]
    axes: tuple[int, ...]  # which of the three each frequency of RoPE takes


@dataclass
class KV:
    keys: mx.array  # [B, H, S, Dk]
    values: mx.array  # [B, H, S, Dv]
    offset: mx.array  # [B], where the running pass writes
    reach: int = 0  # positions that the running pass reads
    start: mx.array | None = None  # [B], where RoPE counts the pass from, if not from `offset`
    positions: TokenPositions | None = None  # of the pass's tokens, if they do not follow one another

    @classmethod
    def empty(cls, rows: int, heads: int, dim: int, dtype: mx.Dtype, value_dim: int | None = None) -> "KV":
        """Return the cache of sequences without tokens. `value_dim` is `dim` unless it is given."""
        dims = (dim, dim if value_dim is None else value_dim)
        return cls.of([mx.zeros((rows, heads, 0, each), dtype) for each in dims])

    @classmethod
    def of(cls, arrays: list[mx.array]) -> "KV":
        """Return the cache that holds `arrays`, as `arrays()` lists them."""
        keys, values = arrays
        return cls(keys, values, mx.zeros((keys.shape[0],), mx.int32))

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values]

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[2])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write `[B, H, W, D]` at each sequence's offset. mlx-lm's attention calls this method by this name."""
        self.keys = _write(self.keys, keys, self.offset)
        self.values = _write(self.values, values, self.offset)
        return self.keys[:, :, : self.reach], self.values[:, :, : self.reach]

    def launch(self) -> None:
        """Launch what is still to be computed. CUDA kernels write into these arrays in place; mlx orders that before
        what it launches later, but knows of no dependency within one launch."""
        if mx.cuda.is_available():
            mx.async_eval(self.keys, self.values)

    def grow(self, capacity: int) -> None:
        """Grow to `capacity` positions. New ones are zero: masked positions still enter P·V as 0·x."""
        missing = capacity - self.capacity
        if missing > 0:
            self.launch()
            padding = [(0, 0), (0, 0), (0, missing), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, padding), mx.pad(self.values, padding)

    def keep(self, rows: mx.array, capacity: int) -> None:
        """Keep only these sequences, and at most `capacity` positions."""
        self.launch()
        self.keys, self.values = self.keys[:, :, :capacity][rows], self.values[:, :, :capacity][rows]
        self.offset = self.offset[rows]

    def join(self, other: "KV") -> None:
        """Append the sequences of `other`."""
        capacity = max(self.capacity, other.capacity)
        self.launch()
        other.launch()
        self.grow(capacity)
        other.grow(capacity)
        self.keys = mx.concatenate([self.keys, other.keys])
        self.values = mx.concatenate([self.values, other.values])
        self.offset = mx.concatenate([self.offset, other.offset])


def _write(into: mx.array, new: mx.array, offset: mx.array) -> mx.array:
    """Compute `into[b, :, offset[b] + w] = new[b, :, w]`.

    Past the capacity this would write into the next head without an error, so `BatchState.reserve` checks on the host
    before every pass.
    """
    if into.shape[0] == 1:
        return mx.slice_update(into, new, offset, axes=(2,))
    positions = offset[:, None] + mx.arange(new.shape[2])  # [B, W]
    return mx.put_along_axis(into, positions[:, None, :, None], new, axis=2)
