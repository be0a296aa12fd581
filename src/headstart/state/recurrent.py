"""State of one GatedDeltaNet or Mamba-2 layer. It cannot be rolled back: it never advances past accepted tokens.

The first token of a window is always committed; only the drafts after it can be rejected. `state` and `conv` include
everything up to that first token. For the drafts only the inputs of the recurrence are kept in `pending`, a few
kilobytes per token. The next pass folds those of the accepted drafts into the state.
"""

from dataclasses import dataclass

import mlx.core as mx


@dataclass
class Pending:
    """Inputs of the recurrence for the p drafts of the last window."""

    qkv: mx.array  # [B, p, C], before the convolution
    k: mx.array  # [B, p, Hk, Dk]
    v: mx.array  # [B, p, Hv, Dv]
    g: mx.array  # [B, p, Hv], decay
    beta: mx.array  # [B, p, Hv]

    @property
    def width(self) -> int:
        return int(self.qkv.shape[1])

    def arrays(self) -> list[mx.array]:
        return [self.qkv, self.k, self.v, self.g, self.beta]


@dataclass
class Recurrent:
    state: mx.array  # [B, Hv, Dv, Dk], float32
    conv: mx.array  # [B, kernel - 1, C], the convolution's last inputs
    pending: Pending | None = None

    @classmethod
    def empty(
        cls, rows: int, heads: int, value: int, key: int, kernel: int, channels: int, dtype: mx.Dtype
    ) -> "Recurrent":
        return cls(mx.zeros((rows, heads, value, key), mx.float32), mx.zeros((rows, kernel - 1, channels), dtype))

    @classmethod
    def of(cls, arrays: list[mx.array]) -> "Recurrent":
        """Return the state that holds `arrays`, as `arrays()` lists them."""
        state, conv, *pending = arrays
        return cls(state, conv, Pending(*pending) if pending else None)

    def arrays(self) -> list[mx.array]:
        return [self.state, self.conv, *(self.pending.arrays() if self.pending else [])]

    def keep(self, rows: mx.array) -> None:
        """Keep only these sequences."""
        self.state, self.conv = self.state[rows], self.conv[rows]
        if self.pending is not None:
            self.pending = Pending(*[a[rows] for a in self.pending.arrays()])

    def join(self, other: "Recurrent") -> None:
        """Append sequences that have just been prefilled: they have no drafts, so their pending inputs are zeros."""
        assert other.pending is None
        self.state = mx.concatenate([self.state, other.state])
        self.conv = mx.concatenate([self.conv, other.conv])
        if self.pending is not None:
            new = other.state.shape[0]
            self.pending = Pending(
                *[mx.concatenate([a, mx.zeros((new, *a.shape[1:]), a.dtype)]) for a in self.pending.arrays()]
            )
