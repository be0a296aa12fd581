"""One description of a matrix for every backend: its weights, and how they are quantised."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

HELD = "_matrix"  # of a layer, in its module, where names with an underscore are no parameters


@dataclass(frozen=True)
class MatrixWeights:
    """A matrix [N, K], or one for each expert [E, N, K], as its module holds it."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16
    group: int = 1  # weights that share a scale
    mode: str = "affine"  # of quantised weights, as MLX names it

    @cached_property
    def outputs(self) -> int:
        return int(self.weight.shape[-2])

    @cached_property
    def inputs(self) -> int:
        words = int(self.weight.shape[-1])
        return words if self.scales is None else words * self.weight.itemsize * 8 // self.bits

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.weight, self.scales, self.biases) if array is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> "MatrixWeights":
        """Return itself: a copied module finds that its weight is another."""
        return self


def matrix_weights(layer: nn.Module) -> MatrixWeights:
    """Return the weights of a linear layer, an embedding, or experts.

    The answer is kept in the module: to ask mlx-lm's modules for every weight in every step takes longer than to
    compute with some of them.
    """
    held: MatrixWeights | None = layer.get(HELD)
    if held is None or held.weight is not layer.get("weight"):
        held = layer[HELD] = _read(layer)
    return held


def _read(layer: nn.Module) -> MatrixWeights:
    if "scales" not in layer:
        return MatrixWeights(layer.weight)
    mode = getattr(layer, "mode", "affine")
    return MatrixWeights(layer.weight, layer.scales, layer.get("biases"), layer.bits, layer.group_size, mode)


def weight_names(count: int, quantised: bool) -> list[str]:
    """Return the names of the arrays of so many matrices, as kernels for GPUs have them."""
    return [f"{letter}{i}" for i in range(count) for letter in ("wsb" if quantised else "w")]
