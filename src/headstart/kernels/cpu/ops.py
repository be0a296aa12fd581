"""What the extension's operations take, and their calls over mlx-lm's modules and the state of a batch.

`native` is the extension (see `load.py`); callers ask for it once and take stock ops where it is None.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

TYPES = (mx.bfloat16, mx.float32)


def multiplies(dtype: mx.Dtype, layer: nn.Module) -> bool:
    """Whether activations of this type are multiplied with this layer."""
    plain = type(layer) in (nn.Linear, nn.Embedding) and "bias" not in layer
    return plain and dtype in TYPES and layer.weight.dtype == dtype


def products(native: Any, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
    """`layer(x)` for every layer, in one pass over the threads. An embedding's is `as_linear`."""
    made: list[mx.array] = native.products(x, [layer.weight for layer in layers])
    return made


def attends(dtype: mx.Dtype, layer: nn.Module) -> bool:
    """Whether this attention layer fits."""
    rope = layer.rope
    plain = type(rope) is nn.RoPE and not rope.traditional and rope.scale == 1
    return plain and dtype in TYPES and layer.head_dim % 32 == 0


def attend(
    native: Any, layer: nn.Module, both: mx.array, k: mx.array, v: mx.array, memory: Any, last: mx.array | None
) -> mx.array:
    """Write a window into `memory` and attend to it: projections [B, W, …] → [B, W, H·D], with `last` [B, 1, H·D]."""
    out, memory.keys, memory.values = native.attention(
        both,
        k,
        v,
        layer.q_norm.weight,
        layer.k_norm.weight,
        _frequencies(layer.rope.dims, layer.rope.base),
        memory.offset,
        memory.keys,
        memory.values,
        layer.q_norm.eps,
        layer.scale,
        last,
    )
    made: mx.array = out
    return made


@cache
def _frequencies(dims: int, base: float) -> mx.array:
    """By which positions turn the pairs of a head, in the bits of every machine."""
    return mx.array([base ** (-2 * i / dims) for i in range(dims // 2)], mx.float32)


def folds(state: mx.array, dtype: mx.Dtype) -> bool:
    """Whether a GatedDeltaNet layer with this state [B, Hv, Dv, Dk] fits."""
    return state.shape[-1] % 16 == 0 and dtype in TYPES
