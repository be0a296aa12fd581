"""What the extension's operations take, and their calls over mlx-lm's modules and the state of a batch.

`native` is the extension (see `load.py`); callers ask for it once and take stock ops where it is None.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

TYPES = (mx.bfloat16, mx.float32)
DENSE = (nn.Linear, nn.Embedding, SwitchLinear)
QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)


def kind(dtype: mx.Dtype, layer: nn.Module) -> tuple[int, int] | None:
    """Return the bits and group size of a quantised layer, zeros for a dense one, None for one that does not fit
    activations of this type."""
    if dtype not in TYPES or "bias" in layer:
        return None
    if type(layer) in DENSE:
        return (0, 0) if layer.weight.dtype == dtype else None
    if type(layer) in QUANTISED and layer.mode == "affine" and layer.scales.dtype in TYPES:
        return layer.bits, layer.group_size
    return None


def products(
    native: Any,
    x: mx.array,
    layers: Sequence[nn.Module],
    *,
    gated: bool = False,
    experts: mx.array | None = None,
    own: bool = False,
) -> list[mx.array] | None:
    """`layer(x)` for every layer, in one pass over the threads; None where they do not fit or are of several kinds.
    An embedding's is `as_linear`. `gated`: of a gate and a layer, `silu(gate(x)) * layer(x)`. With `experts` [..., E]
    of each row; then x is [..., K], or [..., E, K] where each expert has its `own` input."""
    found = kind(x.dtype, layers[0])
    if found is None or any(kind(x.dtype, layer) != found for layer in layers[1:]):
        return None
    arrays = [[layer.weight] if found == (0, 0) else [layer.weight, layer.scales, layer.biases] for layer in layers]
    made: list[mx.array] = native.products(x, arrays, *found, gated, experts, own)
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
