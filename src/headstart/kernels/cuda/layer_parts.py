"""Hold what a decoder layer is made of, as its kernel takes it (see layer.py)."""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..types import GatedDeltaWeights
from ..weights import MatrixWeights
from .products import SumOrder


class NormWeights(NamedTuple):
    weight: mx.array
    eps: float


@dataclass(frozen=True)
class Mlp:
    gate: MatrixWeights
    up: MatrixWeights
    down: MatrixWeights

    def readers(self) -> list[MatrixWeights]:
        """Return the matrices that the input is multiplied by."""
        return [self.gate, self.up]

    def is_like(self, other: "Mlp") -> bool:
        """Return whether the same tiles compute both."""
        pairs = zip((self.gate, self.up, self.down), (other.gate, other.up, other.down), strict=True)
        return all((a.inputs, a.outputs, SumOrder.of(a)) == (b.inputs, b.outputs, SumOrder.of(b)) for a, b in pairs)


@dataclass(frozen=True)
class Mixture:
    router: MatrixWeights
    shared_gate: MatrixWeights
    shared: Mlp
    experts: Mlp  # their weights [E, N, K]
    top: int
    normed: bool

    def readers(self) -> list[MatrixWeights]:
        """Return the matrices that the input is multiplied by."""
        return [self.router, self.shared_gate, *self.shared.readers(), *self.experts.readers()]

    @property
    def experts_per_row(self) -> int:
        """Return how many experts a row takes: the shared one is one of them where it is like the others."""
        return self.top + self.shared.is_like(self.experts)


@dataclass(frozen=True)
class GatedDelta:
    """Hold a GatedDeltaNet: its projections to qkv, z, b and a, and back; and its state."""

    projections: list[MatrixWeights]
    out: MatrixWeights
    weights: GatedDeltaWeights
    state: mx.array
    conv: mx.array
    accepted: mx.array
    pending: list[mx.array] | None
    drafts: int  # of the window


@dataclass(frozen=True)
class GatedAttention:
    projections: list[MatrixWeights]  # to queries and gates, keys, values
    out: MatrixWeights
    norms: tuple[mx.array, mx.array]  # of queries and keys
    eps: float
    rope: nn.RoPE
    scale: float
    keys: mx.array  # [B, Hkv, S, D]: the window's are written into it
    values: mx.array
    offset: mx.array


class LayerOutput(NamedTuple):
    x: mx.array  # [B, W, H], the residual stream
    status: mx.array  # its first element is 1 where a barrier of this launch or one before was given up, else 0
    state: mx.array | None = None  # what a GatedDeltaNet leaves
    conv: mx.array | None = None
    drafts: list[mx.array] | None = None
