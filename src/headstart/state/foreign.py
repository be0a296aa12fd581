"""State of layers that mlx-lm computes itself: arrays that it replaces, or caches that only it understands."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


@dataclass
class Arrays:
    """State of a layer that a pass replaces by its state after the last token: there is no way back."""

    values: list[mx.array]  # [B, ...] each

    def arrays(self) -> list[mx.array]:
        return self.values

    def committed(self) -> tuple[mx.array, ...]:
        """Return what the prefix cache keeps: the state after the last token."""
        return tuple(self.values)

    def restore(self, kept: tuple[mx.array, ...]) -> None:
        self.values = [mx.contiguous(a) for a in kept]

    def keep(self, rows: mx.array) -> None:
        """Keep only these sequences."""
        self.values = [a[rows] for a in self.values]

    def join(self, other: "Arrays") -> None:
        """Append the sequences of `other`."""
        self.values = [mx.concatenate(list(pair)) for pair in zip(self.values, other.values, strict=True)]


@dataclass
class OneSequence:
    """mlx-lm's own caches of the only sequence, of all its layers."""

    caches: list[Any]
    fixed_bytes: int = 0  # that they will take, as far as is known
    position_bytes: int = 0  # and per token
    length: int = 0  # tokens that they hold
    others: list[mx.array] = field(default_factory=list)  # what is to be computed with them

    def arrays(self) -> list[mx.array]:
        flat: Any = tree_flatten([cache.state for cache in self.caches if not cache.empty()])
        return [*(value for _, value in flat if isinstance(value, mx.array)), *self.others]

    def keep(self, rows: mx.array) -> None:
        """Keep only these sequences: there is one."""
        assert rows.size == 1

    def join(self, other: "OneSequence") -> None:
        raise AssertionError("mlx-lm's own caches hold one sequence")
