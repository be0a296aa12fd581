"""The residual stream between the parts of a decoder layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..kernels import cpu
from ..kernels.norm import add_and_norm
from .share import Share


@dataclass(frozen=True)
class Residual:
    """What a part of a layer is added to, and the norm of the sum that the next part is given."""

    x: mx.array  # [B, W, H]
    norm: nn.Module
    share: Share

    def add(self, part: mx.array) -> tuple[mx.array, mx.array]:
        """Return the sum and its norm, where this machine has made a `part` of what is added."""
        return add_and_norm(self.x, self.share.whole(part), self.norm["weight"], self.norm.eps)

    @property
    def native(self) -> cpu.NativeResidual | None:
        """Return the sum as the last stage of a CPU kernel; None where other machines have parts of it."""
        return (self.x, self.norm["weight"], self.norm.eps) if self.share.ranks == 1 else None

    def added(self, made: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Return the sum and its norm, which a CPU kernel may have made already."""
        if len(made) == 1:
            return self.add(made[0])
        total, normed = made
        return total, normed
