"""Products with the weights of linear layers, by MLX's own operations.

These change their order of summation with the number of rows, and on CUDA read quantised weights again for every row,
so that verifying costs as much as decoding. Kernels of ours read a weight once for all rows, and sum a row in one
order for any number of them.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from .adapters import ChosenAdapters
from .norms import Norms


def stock_product(x: mx.array, layer: nn.Module) -> mx.array:
    """Return mlx's own product, in the type of x where scales have another. An embedding's is `as_linear`."""
    made: mx.array = layer.as_linear(x) if hasattr(layer, "as_linear") else layer(x)
    return made.astype(x.dtype)


def add_biases(made: Sequence[mx.array], layers: Sequence[nn.Module]) -> list[mx.array]:
    return [y + layer["bias"] if "bias" in layer else y for y, layer in zip(made, layers, strict=True)]


class Products(Norms):
    """Products of linear layers; what adapters add comes on top."""

    def product(self, x: mx.array, layer: nn.Module, adapters: ChosenAdapters | None = None) -> mx.array:
        """Return `layer(x)`, where `layer` is linear: [..., K] → [..., N]. An embedding's is `as_linear`."""
        return self.products(x, (layer,), adapters)[0]

    def products(
        self, x: mx.array, layers: Sequence[nn.Module], adapters: ChosenAdapters | None = None
    ) -> list[mx.array]:
        """Return `layer(x)` for layers that share an input, with what adapters add."""
        made = self.multiply(x, layers)
        return made if adapters is None else adapters.add(made, x, layers, None, self.row_products)

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        """Return `layer(x)` for every layer, without adapters."""
        return [stock_product(x, layer) for layer in layers]

    def logits(self, hidden: mx.array, layer: nn.Module) -> mx.array:
        """Return the logits […, V] of hidden states […, H], in their type or in float32."""
        return self.product(hidden, layer)

    def gated_product(
        self, x: mx.array, gate: nn.Module, up: nn.Module, adapters: ChosenAdapters | None = None
    ) -> mx.array:
        """Return `silu(gate(x)) * up(x)`, the first half of an MLP."""
        return swiglu(*self.products(x, (gate, up), adapters))

    def row_products(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """Return the product of every row with the weights [S, N, K] at its `indices` [..., E]: [..., E, N].

        `x` is [..., K], or [..., E, K]. Every row is a product of its own, whatever kernel computes it.
        """
        x = x[..., None, :] if x.ndim > indices.ndim else x[..., None, None, :]
        return mx.gather_mm(x, weights.swapaxes(-1, -2), rhs_indices=indices).squeeze(-2)
