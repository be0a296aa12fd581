"""Call the extension's attention with mlx-lm's modules: all of a layer in one operation.

Functions return None for what does not fit: callers then take stock ops.
"""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from .ops import NativeResidual, linears

PERIODS = 4096  # of positions, for which queries have a scale


class Rotation(NamedTuple):
    """How heads turn with the position, see `Heads`."""

    frequencies: mx.array | None
    interleaved: bool = False
    scale: float = 1.0


class Heads(NamedTuple):
    """What an attention layer has beside its projections, in the order in which the extension takes it."""

    query_heads: int
    kv_heads: int
    scale: float
    eps: float
    q_norm: mx.array | None  # [D]
    k_norm: mx.array | None  # [D]
    frequencies: mx.array | None  # [rotated / 2]
    interleaved: bool = False  # pairs that turn are neighbours, not half of `rotated` apart
    rotation_scale: float = 1.0  # of what turns
    value_scale: float = 1.0
    sinks: mx.array | None = None  # [query_heads], scores without values
    query_scales: mx.array | None = None  # for every `period` positions
    period: int = 0


def native_attention(
    native: Any, layer: nn.Module, x: mx.array, memory: Any, last: mx.array | None, residual: NativeResidual | None
) -> list[mx.array] | None:
    """Write a window into `memory` and attend to it: [B, W, H] → [B, W, H], or of token `last` [B] of each row
    [B, 1, H]; with a residual their sum and its norm. For Qwen3.5's attention."""
    heads = gated_heads(layer)
    return None if heads is None else _whole_layer(native, layer, heads, x, memory, last, residual)


def native_grouped_attention(
    native: Any, layer: nn.Module, x: mx.array, memory: Any, last: mx.array | None, residual: NativeResidual | None
) -> list[mx.array] | None:
    """Do the same for grouped-query attention of any kind that mlx-lm has (see `models/attention.py`)."""
    heads = grouped_heads(layer, x.dtype)
    return None if heads is None else _whole_layer(native, layer, heads, x, memory, last, residual)


def _whole_layer(
    native: Any,
    layer: nn.Module,
    heads: Heads,
    x: mx.array,
    memory: Any,
    last: mx.array | None,
    residual: NativeResidual | None,
) -> list[mx.array] | None:
    names = ("q_proj", "k_proj", "v_proj", *(("g_proj",) if "g_proj" in layer else ()), "o_proj")
    found = linears([layer[name] for name in names], x.dtype)
    if found is None:
        return None
    held = memory.arrays()
    past = held, memory.offset, memory.window or 0, _angles(heads, memory, x.shape[1]), last
    made: list[mx.array] = native.attention_layer(x, found[:-1], found[-1], heads, *past, residual)
    memory.keys, memory.values, *memory.scales = made[: len(held)]
    return made[len(held) :]


def native_latent_attention(
    native: Any,
    layer: nn.Module,
    x: mx.array,
    scales: tuple[float, float],
    memory: Any,
    last: mx.array | None,
    residual: NativeResidual | None,
) -> list[mx.array] | None:
    """Do the same for latent attention. `scales`: of queries and latents (see `models/latent_attention.py`)."""
    rotation, k_norm = rotation_of(layer["rope"]), layer["kv_a_layernorm"]
    q_norm = layer.get("q_a_layernorm")
    first = layer["q_proj"] if q_norm is None else layer["q_a_proj"]
    rest = [layer[name] for name in ("kv_a_proj_with_mqa", "embed_q", "unembed_out", "o_proj")]
    found = linears([first, *rest, *([] if q_norm is None else [layer["q_b_proj"]])], x.dtype)
    if found is None or rotation is None or (q_norm is not None and q_norm.eps != k_norm.eps):
        return None
    norms = k_norm.eps, None if q_norm is None else q_norm["weight"], k_norm["weight"]
    heads = Heads(layer.num_heads, 1, layer.scale, *norms, *rotation, value_scale=scales[1])
    held = memory.arrays()
    q_b = None if q_norm is None else found[5]
    made: list[mx.array] = native.latent_layer(
        x, found[:5], q_b, heads, scales[0], held, memory.offset, last, residual
    )
    memory.keys, memory.values, *memory.scales = made[: len(held)]
    return made[len(held) :]


def attend_window(
    native: Any,
    heads: Heads,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    memory: Any,
    last: mx.array | None,
    gates: mx.array | None = None,
) -> mx.array:
    """Do the same between the projections: [B, W, …] → [B, W, H·D], or [B, 1, H·D]."""
    angles = _angles(heads, memory, queries.shape[1])
    out, memory.keys, memory.values, *memory.scales = native.attention(
        queries, keys, values, gates, heads, memory.arrays(), memory.offset, memory.window or 0, angles, last
    )
    made: mx.array = out
    return made


def gated_heads(layer: nn.Module) -> Heads | None:
    """Return what Qwen3.5's attention has, None if the extension does not take it."""
    return _heads(layer, layer.num_attention_heads, layer.num_key_value_heads)


def grouped_heads(layer: nn.Module, dtype: mx.Dtype) -> Heads | None:
    """Return what grouped-query attention has, None if the extension does not take it."""
    heads = _heads(layer, layer.n_heads, layer.n_kv_heads)
    if heads is None:
        return None
    sinks, scale = layer.get("attention_sink_bias"), getattr(layer, "value_scale", None)
    heads = heads._replace(sinks=sinks, value_scale=1.0 if scale is None else scale)
    if (beta := getattr(layer, "scaling_beta", None)) is None:
        return heads
    period = layer.original_max_position_embeddings
    return heads._replace(query_scales=_query_scales(beta, dtype), period=period)


def _heads(layer: nn.Module, query_heads: int, kv_heads: int) -> Heads | None:
    rotation = rotation_of(layer.get("rope"))
    q_norm, k_norm = layer.get("q_norm"), layer.get("k_norm")
    if rotation is None or (q_norm is not None and "bias" in q_norm):
        return None
    if q_norm is None or k_norm is None:
        return Heads(query_heads, kv_heads, layer.scale, 0.0, None, None, *rotation)
    return Heads(query_heads, kv_heads, layer.scale, q_norm.eps, q_norm["weight"], k_norm["weight"], *rotation)


def rotation_of(rope: nn.Module | None) -> Rotation | None:
    """Return what one of mlx-lm's RoPE modules does, None if the extension cannot do it."""
    if rope is None:
        return Rotation(None)
    held: Rotation | None = rope.get("_rotation")  # names with an underscore are no parameters
    if held is None and (held := _rotation(rope)) is not None:
        rope["_rotation"] = held
    return held


def _rotation(rope: nn.Module) -> Rotation | None:
    if type(rope) is nn.RoPE:
        return Rotation(_frequencies(rope.dims, rope.base, rope.scale), rope.traditional)
    if type(rope) is SuScaledRoPE:
        return Rotation(1 / rope["_freqs"], False, rope._scale)
    if type(rope) in (Llama3RoPE, ProportionalRoPE, YarnRoPE):
        return Rotation(1 / rope["_freqs"], rope.traditional, getattr(rope, "mscale", 1.0))
    return None


@cache
def _frequencies(dims: int, base: float, scale: float) -> mx.array:
    """Return the frequencies of RoPE, with the same bits on every machine."""
    return mx.array([scale * base ** (-2 * i / dims) for i in range(dims // 2)], mx.float32)


@cache
def _query_scales(beta: float, dtype: mx.Dtype) -> mx.array:
    """Return Ministral 3's scales of queries, in the type in which the model has them."""
    return (1 + beta * mx.log(1 + mx.arange(PERIODS, dtype=mx.float32))).astype(dtype).astype(mx.float32)


def _angles(heads: Heads, memory: Any, width: int) -> mx.array | None:
    """Return the angles [B, W, rotated / 2] of tokens, None if their positions count from `memory.offset`."""
    if heads.frequencies is None:
        return None
    if memory.positions is not None:
        ids, axes = memory.positions
        angles: mx.array = ids[:, list(axes)].swapaxes(1, 2).astype(mx.float32) * heads.frequencies
        return angles
    if memory.start is None:
        return None
    return (memory.start[:, None] + mx.arange(width))[..., None].astype(mx.float32) * heads.frequencies
