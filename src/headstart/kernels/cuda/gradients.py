"""MLX's operations to train with on NVIDIA cards, where its quantised products of many rows are slow."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..backend import Backend
from ..products import add_biases
from ..weights import dequantised


class CudaGradients(Backend):
    """Frozen matrices, quantised or of another type than what they multiply, are widened once."""

    def __init__(self) -> None:
        super().__init__("MLX's operations on widened matrices")
        self._frozen: dict[int, tuple[mx.array, mx.array]] = {}  # by the id of a weight: that weight, and its numbers

    def with_gradients(self) -> "CudaGradients":
        return self

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        return add_biases([x @ self._matrix(layer, x.dtype).T for layer in layers], layers)

    def _matrix(self, layer: nn.Module, dtype: mx.Dtype) -> mx.array:
        weight: mx.array = layer["weight"]
        if weight.dtype == dtype:
            return weight
        if (held := self._frozen.get(id(weight))) is None or held[0] is not weight:
            held = self._frozen[id(weight)] = weight, dequantised(layer).astype(dtype)
            mx.eval(held[1])
        return held[1]
