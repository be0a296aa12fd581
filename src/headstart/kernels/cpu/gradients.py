"""The extension's products with gradients, to train on a CPU: MLX's own take ten to fifty times as long there."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...state import KV
from ..layers import Attention, Pass
from ..products import add_biases
from ..types import ArrangedHeads
from ..weights import dequantised
from .backend import StockCpu

PART = 4096  # terms of a sum that are multiplied at a time: longer rows do not stay in a cache


class CpuGradients(StockCpu):
    """MLX's but for products. Quantised matrices and embeddings are widened once, and have no gradients."""

    def __init__(self, native: Any):
        super().__init__(f"native products with gradients ({native.isa()}, {native.threads()} threads)")
        self.native = native
        self._frozen: dict[int, tuple[mx.array, Any]] = {}  # by the id of a weight: that weight, and its product

        @mx.custom_function
        def product(x: mx.array, weight: mx.array) -> mx.array:
            return self._multiply(x, weight)

        @product.vjp
        def gradients(given: Any, upper: mx.array, made: mx.array) -> tuple[mx.array, mx.array]:
            x, weight = given
            rows, uppers = (a.reshape(-1, a.shape[-1]).T for a in (x, upper))
            return self._multiply(upper, mx.contiguous(weight.T)), self._multiply(*map(mx.contiguous, (uppers, rows)))

        self._product: Any = product

    def with_gradients(self) -> "CpuGradients":
        return self

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        made = [
            self._product(x, layer["weight"]) if self._trains(layer, x.dtype) else self._frozen_product(layer)(x)
            for layer in layers
        ]
        return add_biases(made, layers)

    def _multiply(self, x: mx.array, weight: mx.array) -> mx.array:
        made: mx.array = self.native.products(x, [(weight, None, None, 0, 0, None, None)])[0]
        return made

    def _trains(self, layer: nn.Module, dtype: mx.Dtype) -> bool:
        return type(layer) is nn.Linear and layer["weight"].dtype == dtype

    def _frozen_product(self, layer: nn.Module) -> Any:
        weight = layer["weight"]
        if (held := self._frozen.get(id(weight))) is None or held[0] is not weight:
            wide = dequantised(layer)
            held = self._frozen[id(weight)] = weight, _with_gradient(self._multiply, wide)
        return held[1]

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        """Multiply head by head."""
        if layer.sinks is not None or run.last is not None:
            return super().attend_heads(layer, heads, both, memory, run)
        made, share = [], layer.heads // layer.kv_heads
        seen = mx.where(run.mask(layer.window), 0.0, -mx.inf)  # [1, 1, W, S]
        for row in range(heads.queries.shape[0]):
            by_head = []
            for head in range(layer.heads):
                keys, values = heads.keys[row, head // share], heads.values[row, head // share]
                scores = self._product(heads.queries[row, head] * layer.module.scale, keys)
                weights = mx.softmax(scores + seen[0, 0], axis=-1)
                by_head.append(self._product(weights, values.T))  # [W, D]
            made.append(mx.concatenate(by_head, axis=-1))
        out = mx.stack(made)
        if not layer.gated:
            return out
        gates = both.reshape(*both.shape[:2], layer.heads, -1)[..., layer.head_sizes[0] :]
        return out * mx.sigmoid(gates.reshape(out.shape))


def _with_gradient(multiply: Callable[[mx.array, mx.array], mx.array], weight: mx.array) -> Any:
    """Return the product with a weight [N, K] that has a gradient by its input only."""
    parts = [mx.contiguous(weight[n : n + PART].T) for n in range(0, weight.shape[0], PART)]
    mx.eval(weight, parts)

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return multiply(x, weight)

    @product.vjp
    def gradient(x: mx.array, upper: mx.array, made: mx.array) -> mx.array:
        uppers = (upper[..., number * PART : (number + 1) * PART] for number in range(len(parts)))
        each = [multiply(upper, part) for upper, part in zip(uppers, parts, strict=True)]
        total: mx.array = sum(each[1:], each[0])
        return total

    return product
