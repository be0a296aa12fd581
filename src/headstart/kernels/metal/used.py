"""How many products of one input a model's layers have: kernels are compiled for no more than that."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ...state import BatchState
from ..backend import Backend
from ..layers import FeedForward, Layer, Part, Pass, Residual
from ..memories import memories_of
from ..weights import MatrixWeights, matrix_weights
from .products import MOST_FUSED
from .stock import StockMetal

Format = tuple[int, int]  # bits, and weights that share a scale


def weights_format(weights: MatrixWeights) -> Format:
    return weights.bits, weights.group


class Noting(StockMetal):
    """Notes which products share an input. Nothing is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[Format, int] = {}

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        found = [matrix_weights(layer) for layer in layers]
        for key in {weights_format(each) for each in found}:
            together = sum(weights_format(each) == key for each in found)
            self.most[key] = max(self.most.get(key, 1), min(together, MOST_FUSED))
        return [mx.zeros((*x.shape[:-1], each.outputs), x.dtype) for each in found]

    def delta_recurrence(
        self, tokens: list[mx.array], state: mx.array, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        return Backend.delta_recurrence(self, tokens, state, mask)


def most_fused(layers: Sequence[Layer], dtype: mx.Dtype) -> dict[Format, int] | None:
    """Return how many weights of a format layers multiply by one input at most; None where that is not known. What is
    missing is multiplied alone."""
    noting = Noting()
    try:
        for part in {layer.kind: layer.parts for layer in layers}.values():
            for each in part:
                _describe(noting, each, dtype)
    except Exception:  # a family that computes in another way: nothing is left out then
        return None
    return noting.most if layers else None


def _describe(backend: Backend, part: Part, dtype: mx.Dtype) -> None:
    x = mx.zeros((1, 1, part.norm.weight.shape[0]), dtype)
    memory = [] if isinstance(part.does, FeedForward) else memories_of(part.does, 1, dtype, False)
    state = BatchState.empty(memory, 1)
    run = Pass(state.reserve(1), state.accepted, tokens=mx.zeros((1, 1), mx.int32))
    backend.run_part(part, x, iter(memory), run, Residual(x, part.norm))
