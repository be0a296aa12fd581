"""The memory of one GatedDeltaNet layer, which cannot be rolled back, so is never rolled forward too far.

The first token of a window is always committed; only the drafts are in doubt. `state` and `conv` stand after
everything certain. What the last window's drafts would have done to them waits in `pending`: the inputs of the
recurrence, a few kilobytes a token. The next pass folds in the prefix of them that was accepted.
"""

from dataclasses import dataclass, fields

import mlx.core as mx


@dataclass
class Pending:
    """Inputs of the recurrence for the drafts of the last window, p of them."""

    qkv: mx.array  # [B, p, C], before the convolution
    k: mx.array  # [B, p, Hk, Dk]
    v: mx.array  # [B, p, Hv, Dv]
    g: mx.array  # [B, p, Hv], decay
    beta: mx.array  # [B, p, Hv]

    @property
    def width(self) -> int:
        return int(self.qkv.shape[1])

    def arrays(self) -> list[mx.array]:
        return [getattr(self, field.name) for field in fields(self)]


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

    def conv_history(self, accepted: mx.array) -> mx.array:
        """The convolution's inputs just before the new window: the last ones of what was accepted."""
        if self.pending is None:
            return self.conv
        inputs = mx.concatenate([self.conv, self.pending.qkv], axis=1)
        last = accepted[:, None] + mx.arange(self.conv.shape[1])  # [B, kernel - 1]
        return mx.take_along_axis(inputs, last[..., None], axis=1)

    def keep(self, rows: mx.array) -> None:
        self.state, self.conv = self.state[rows], self.conv[rows]
        if self.pending is not None:
            self.pending = Pending(*[a[rows] for a in self.pending.arrays()])

    def join(self, other: "Recurrent") -> None:
        """`other` has just been prefilled, so nothing of it is in doubt; its pending drafts are blanks."""
        assert other.pending is None
        self.state = mx.concatenate([self.state, other.state])
        self.conv = mx.concatenate([self.conv, other.conv])
        if self.pending is not None:
            rows = other.state.shape[0]
            self.pending = Pending(
                *[mx.concatenate([a, mx.zeros((rows, *a.shape[1:]), a.dtype)]) for a in self.pending.arrays()]
            )

    def arrays(self) -> list[mx.array]:
        return [self.state, self.conv, *(self.pending.arrays() if self.pending else [])]

    def hold(self, arrays: list[mx.array]) -> None:
        self.state, self.conv, *pending = arrays
        self.pending = Pending(*pending) if pending else None

    @classmethod
    def of(cls, arrays: list[mx.array]) -> "Recurrent":
        state, conv, *pending = arrays
        return cls(state, conv, Pending(*pending) if pending else None)
