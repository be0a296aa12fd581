"""KV cache of one attention layer, for sequences of different lengths.

Every sequence writes at its own length, and lengths advance only by accepted tokens. What a rejected draft wrote lies
beyond the length: it is masked, and the next window overwrites it. Rollback costs nothing.

In eight bits keys and values are whole numbers up to 127, and GROUP of them share a scale. Each token is rounded
by itself, so rows stay independent. Kernels for CPUs read them in place; other attention gets the numbers in an array
of its own: that saves memory, not time.

A layer that attends to selected tokens also keeps what it selects them by, its `index`: by position and committed
with the rest, and as it is also in eight bits.

An entry may stand for `every` so many tokens: a whole block of them. It is written by the pass over its last token,
and counts once that one is committed. So all of this holds for it too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

BLOCK = 256  # positions; capacity grows by whole blocks
STRIDE = 64  # positions; attention reads whole strides, as few as hold every sequence
GROUP = 32  # numbers that share a scale in eight bits


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
    begins: int | None = (
        None  # `offset` of the only sequence as the host knows it: at most so, in a prompt exactly so
    )
    start: mx.array | None = None  # [B], where RoPE counts the pass from, if not from `offset`
    positions: TokenPositions | None = None  # of the pass's tokens, if they do not follow one another
    ends: mx.array | None = None  # [B, W], where what its tokens see of a window ends, if not after each
    scales: list[mx.array] = field(default_factory=list)  # [B, H, S, D/GROUP] of keys and values, in eight bits
    index: list[mx.array] = field(default_factory=list)  # [B, 1, S, D] each
    written_in_place: bool = False  # by a kernel that MLX does not order before all that reads these arrays
    every: int = 1  # tokens that an entry stands for; `offset` and `reach` count entries

    @classmethod
    def empty(
        cls,
        rows: int,
        heads: int,
        dim: int,
        dtype: mx.Dtype,
        value_dim: int | None = None,
        *,
        eight_bits: bool = False,
        index: Sequence[tuple[int, mx.Dtype]] = (),
        every: int = 1,
    ) -> "KV":
        """Return the cache of sequences without tokens. `value_dim` is `dim` unless it is given. `index`: the size
        and type of what else is kept of each entry, which stands for `every` so many tokens."""
        dims = (dim, dim if value_dim is None else value_dim)
        numbers = [mx.zeros((rows, heads, 0, each), mx.int8 if eight_bits else dtype) for each in dims]
        scales = [mx.zeros((rows, heads, 0, each // GROUP), dtype) for each in dims] if eight_bits else []
        return cls.of(numbers + scales + [mx.zeros((rows, 1, 0, size), of) for size, of in index], every)

    @classmethod
    def of(cls, arrays: list[mx.array], every: int = 1) -> "KV":
        """Return the cache that holds `arrays`, as `arrays()` lists them."""
        keys, values, *rest = arrays
        scales = 2 if keys.dtype == mx.int8 else 0
        offset = mx.zeros((keys.shape[0],), mx.int32)
        return cls(keys, values, offset, scales=rest[:scales], index=rest[scales:], every=every)

    def arrays(self) -> list[mx.array]:
        return [self.keys, self.values, *self.scales, *self.index]

    def replace(self, arrays: list[mx.array]) -> list[mx.array]:
        """Hold the first of `arrays`, in the order of `arrays()`, and return the others."""
        held = 2 + len(self.scales)
        count = held + len(self.index)
        (self.keys, self.values, *self.scales), self.index = arrays[:held], arrays[held:count]
        return arrays[count:]

    @property
    def capacity(self) -> int:
        """Return the tokens that it has room for."""
        return int(self.keys.shape[2]) * self.every

    @property
    def eight_bits(self) -> bool:
        return bool(self.scales)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write `[B, H, W, D]` at each sequence's offset. mlx-lm's attention calls this method by this name."""
        self.write(keys, values)
        return self.fetch()

    def write(self, keys: mx.array, values: mx.array) -> None:
        new = [keys, values]
        if self.eight_bits:
            new = [part for pair in zip(_round(keys), _round(values), strict=True) for part in pair]
        held = [self.keys, self.values, *self.scales]
        written = [_write(into, a, self.offset) for into, a in zip(held, new, strict=True)]
        self.keys, self.values, *self.scales = written

    def fetch(self) -> tuple[mx.array, mx.array]:
        """Return what is in reach, `[B, H, S, D]`."""
        return self._numbers([a[:, :, : self.reach] for a in self.arrays()])

    def take(self, at: mx.array) -> tuple[mx.array, mx.array]:
        """Return what is at these positions [B, N] of each sequence, `[B, H, N, D]`."""
        held = [self.keys, self.values, *self.scales]
        return self._numbers([mx.take_along_axis(a, at[:, None, :, None], axis=2) for a in held])

    def _numbers(self, arrays: list[mx.array]) -> tuple[mx.array, mx.array]:
        keys, values, *scales = arrays
        if self.eight_bits:
            keys, values = _multiply(keys, scales[0]), _multiply(values, scales[1])
        return keys, values

    def update_index(self, new: list[mx.array]) -> list[mx.array]:
        """Write what the index has of a window, `[B, 1, W, D]` each, and return what is in reach."""
        self.index = [_write(into, a, self.offset) for into, a in zip(self.index, new, strict=True)]
        return [a[:, :, : self.reach] for a in self.index]

    def launch(self) -> None:
        """Launch what is still to be computed. Kernels may write into these arrays in place; mlx orders that before
        what it launches later, but knows of no dependency within one launch. Where it does not even order that, wait.
        """
        if self.written_in_place:
            mx.eval(self.arrays())
            self.written_in_place = False
        else:
            mx.async_eval(self.arrays())

    def grow(self, capacity: int) -> None:
        """Grow to `capacity` positions. New ones are zero: masked positions still enter P·V as 0·x."""
        missing = (capacity - self.capacity) // self.every
        if missing > 0:
            self.launch()
            self._change(lambda a: mx.pad(a, [(0, 0), (0, 0), (0, missing), (0, 0)]))

    def keep(self, rows: mx.array, capacity: int) -> None:
        """Keep only these sequences, and at most `capacity` positions."""
        self.launch()
        self._change(lambda a: a[:, :, : capacity // self.every][rows])
        self.offset = self.offset[rows]

    def join(self, other: "KV") -> None:
        """Append the sequences of `other`."""
        capacity = max(self.capacity, other.capacity)
        self.launch()
        other.launch()
        self.grow(capacity)
        other.grow(capacity)
        theirs = iter(other.arrays())
        self._change(lambda a: mx.concatenate([a, next(theirs)]))
        self.offset = mx.concatenate([self.offset, other.offset])

    def _change(self, change: Callable[[mx.array], mx.array]) -> None:
        self.replace([change(a) for a in self.arrays()])


def _write(into: mx.array, new: mx.array, offset: mx.array) -> mx.array:
    """Compute `into[b, :, offset[b] + w] = new[b, :, w]`.

    Past the capacity this would write into the next head without an error, so `BatchState.reserve` checks on the host
    before every pass.
    """
    if not new.size:  # keys without a rotated part have none
        return into
    if into.shape[0] == 1:
        return mx.slice_update(into, new, offset, axes=(2,))
    positions = offset[:, None] + mx.arange(new.shape[2])  # [B, W]
    return mx.put_along_axis(into, positions[:, None, :, None], new, axis=2)


def _round(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return numbers [..., D] as whole ones in eight bits and their scales [..., D/GROUP]."""
    groups = mx.unflatten(x.astype(mx.float32), -1, (x.shape[-1] // GROUP, GROUP))  # of none too
    scales = (mx.abs(groups).max(axis=-1) / 127).astype(x.dtype)
    divisors = mx.maximum(scales.astype(mx.float32), 1e-30)[..., None]
    return mx.clip(mx.round(groups / divisors), -127, 127).astype(mx.int8).flatten(-2), scales


def _multiply(numbers: mx.array, scales: mx.array) -> mx.array:
    return (mx.unflatten(numbers.astype(scales.dtype), -1, (scales.shape[-1], GROUP)) * scales[..., None]).flatten(-2)
