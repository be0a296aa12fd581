"""State of one GatedDeltaNet or Mamba-2 layer. It cannot be rolled back: it never advances past accepted tokens.

The first token of a window is always committed; only the drafts after it can be rejected. `state` and `conv` include
everything up to that first token. For the drafts only the inputs of the recurrence are kept in `pending`, a few
kilobytes per token. The next pass folds those of the accepted drafts into the state. The kernel
that made them chooses their layout: the five arrays of `PendingDrafts` in `kernels/types.py`, or on CUDA one.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass
class Recurrent:
    state: mx.array  # [B, Hv, Dv, Dk], float32
    conv: mx.array  # [B, kernel - 1, C], the convolution's last inputs
    pending: list[mx.array] | None = None  # [B, p, ...], of the p drafts of the last window
    kept: tuple[mx.array, mx.array] | None = None  # `state` and `conv` in the middle of a prompt's pass

    @classmethod
    def empty(
        cls, rows: int, heads: int, value: int, key: int, kernel: int, channels: int, dtype: mx.Dtype
    ) -> "Recurrent":
        return cls(mx.zeros((rows, heads, value, key), mx.float32), mx.zeros((rows, kernel - 1, channels), dtype))

    @classmethod
    def of(cls, arrays: list[mx.array]) -> "Recurrent":
        """Return the state that holds `arrays`, as `arrays()` lists them."""
        state, conv, *pending = arrays
        return cls(state, conv, pending or None)

    def take_kept(self) -> tuple[mx.array, mx.array]:
        """Return what was kept in the middle of a pass, and forget it."""
        assert self.kept is not None
        kept, self.kept = self.kept, None
        return kept

    def committed(self) -> tuple[mx.array, ...]:
        """Return what the prefix cache keeps, where no drafts are pending."""
        return self.state, self.conv

    def restore(self, kept: tuple[mx.array, ...]) -> None:
        self.state, self.conv = (mx.contiguous(a) for a in kept)

    def arrays(self) -> list[mx.array]:
        return [self.state, self.conv, *(self.pending or [])]

    def keep(self, rows: mx.array) -> None:
        """Keep only these sequences."""
        self.state, self.conv = self.state[rows], self.conv[rows]
        if self.pending is not None:
            self.pending = [a[rows] for a in self.pending]

    def join(self, other: "Recurrent") -> None:
        """Append sequences that have just been prefilled: they have no drafts, so their pending inputs are zeros."""
        assert other.pending is None
        self.state = mx.concatenate([self.state, other.state])
        self.conv = mx.concatenate([self.conv, other.conv])
        if self.pending is not None:
            new = other.state.shape[0]
            self.pending = [mx.concatenate([a, mx.zeros((new, *a.shape[1:]), a.dtype)]) for a in self.pending]
