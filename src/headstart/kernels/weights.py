"""One description of a matrix for every backend: its weights, and how they are quantised."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

NVFP4_MOST = 448.0 * 6
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
    whole: mx.array | None = None  # nvfp4's scale of all numbers, times NVFP4_MOST; of experts, one for each

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


def dequantised(layer: nn.Module) -> mx.array:
    """Return the numbers of a layer's weight in float32."""
    weight: mx.array = layer["weight"]
    if "scales" not in layer:
        return weight.astype(mx.float32)
    scales, biases = layer["scales"], layer.get("biases")
    if biases is not None:  # MLX computes in the type of affine scales
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    numbers = mx.dequantize(weight, scales, biases, layer.group_size, layer.bits, layer.mode, dtype=mx.float32)
    return numbers * (layer["global_scale"] / NVFP4_MOST) if "global_scale" in layer else numbers


class ScaledLinear(nn.QuantizedLinear):
    """A linear layer in nvfp4 with one scale for the whole matrix, which MLX's product does not take: as MLX has it,
    of the largest number that the format holds with its largest scale."""

    def __call__(self, x: mx.array) -> mx.array:
        how: Any = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        made = mx.quantized_matmul(_wide(x), self["weight"], self["scales"], **how)
        made = (made * (self["global_scale"] / NVFP4_MOST)).astype(x.dtype)
        return made + self["bias"] if "bias" in self else made


class ScaledSwitchLinear(QuantizedSwitchLinear):
    """Experts in nvfp4 with a scale for each, which MLX's product takes on GPUs only."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        how: Any = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        given = _wide(x), self["weight"], self["scales"]
        made = mx.gather_qmm(*given, rhs_indices=indices, sorted_indices=sorted_indices, **how)
        scales = (self["global_scale"] / NVFP4_MOST)[indices][..., None, None]
        made = (made * scales).astype(x.dtype)
        return made + self["bias"][indices][..., None, :] if "bias" in self else made


def _wide(x: mx.array) -> mx.array:
    """Return x in a type that holds a product before it is scaled."""
    return x.astype(mx.float32) if x.dtype == mx.float16 else x


def scaled_layer(layer: nn.Module) -> nn.Module:
    """Return a quantised layer, of which nothing is read yet, as one that has a scale for each matrix."""
    *experts, outputs, words = layer.weight.shape
    kind: Any = ScaledSwitchLinear if experts else ScaledLinear
    made = kind(8 * words, outputs, *experts, "bias" in layer, layer.group_size, layer.bits, layer.mode)
    made.global_scale = mx.full(experts, NVFP4_MOST)
    return made


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
    how = layer.get("biases"), layer.bits, layer.group_size, mode, layer.get("global_scale")
    return MatrixWeights(layer.weight, layer.scales, *how)


def weight_names(count: int, quantised: bool) -> list[str]:
    """Return the names of the arrays of so many matrices, as kernels for GPUs have them."""
    return [f"{letter}{i}" for i in range(count) for letter in ("wsb" if quantised else "w")]
