"""Call the extension's attention with mlx-lm's modules: all of a layer in one operation.

Functions return None for what does not fit: callers then take stock ops.
"""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from ...state import KV
from ..layers import Attention, LatentAttention, Pass
from .ops import TYPES, NativeResidual, linears

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


def attention_arguments(layer: Attention, x: mx.array, memory: KV, run: Pass) -> tuple[Any, ...] | None:
    """Return what the extension is given of a layer to write a window [B, W, H] into `memory` and attend to it."""
    part, heads = layer.module, heads_of(layer, x.dtype)
    if layer.shares is not None or layer.looks_ahead(memory):  # values have a norm, or are another layer's
        return None
    names = ("q_proj", "k_proj", "v_proj", *(("g_proj",) if "g_proj" in part else ()), "o_proj")
    found = linears([part[name] for name in names], x.dtype, run.adapters)
    if found is None or heads is None:
        return None
    past = memory.arrays(), memory.offset, layer.window or 0, _angles(heads, memory, x.shape[1])
    return found[:-1], found[-1], heads, *past


def native_attention(
    native: Any, layer: Attention, x: mx.array, memory: KV, run: Pass, residual: NativeResidual | None
) -> list[mx.array] | None:
    """Do it: [B, W, H] → [B, W, H], or of token `run.last` [B] of each row [B, 1, H]; with a residual their sum and
    its norm."""
    if (given := attention_arguments(layer, x, memory, run)) is None:
        return None
    return memory.replace(native.attention_layer(x, *given, run.last, residual))


def latent_arguments(layer: LatentAttention, x: mx.array, memory: KV, run: Pass) -> tuple[Any, ...] | None:
    """Return what the extension is given of a layer of latent attention."""
    part = layer.module
    if layer.head_gates is not None or layer.budget is not None or not part.qk_rope_head_dim:
        return None
    rotation, k_norm, q_norm = rotation_of(part["rope"]), part["kv_a_layernorm"], part.get("q_a_layernorm")
    first = part["q_proj"] if q_norm is None else part["q_a_proj"]
    rest = [*(part[name] for name in ("kv_a_proj_with_mqa", "embed_q", "unembed_out")), layer.output]
    found = linears([first, *rest, *([] if q_norm is None else [part["q_b_proj"]])], x.dtype, run.adapters)
    if found is None or rotation is None or (q_norm is not None and q_norm.eps != k_norm.eps):
        return None
    norms = k_norm.eps, None if q_norm is None else q_norm["weight"], k_norm["weight"]
    heads = Heads(part.num_heads, 1, part.scale, *norms, *rotation, value_scale=layer.latent_scale)
    return found[:5], None if q_norm is None else found[5], heads, layer.query_scale, memory.arrays(), memory.offset


def native_latent_attention(
    native: Any,
    layer: LatentAttention,
    x: mx.array,
    memory: KV,
    run: Pass,
    residual: NativeResidual | None,
) -> list[mx.array] | None:
    """Do the same for latent attention."""
    if (given := latent_arguments(layer, x, memory, run)) is None:
        return None
    return memory.replace(native.latent_layer(x, *given, run.last, residual))


def attend_window(
    native: Any,
    layer: Attention,
    heads: Heads,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    memory: KV,
    last: mx.array | None,
) -> mx.array:
    """Do the same between the projections: [B, W, …] → [B, W, H·D], or [B, 1, H·D]."""
    angles, held = _angles(heads, memory, queries.shape[1]), memory.arrays()
    past = held, memory.offset, layer.window or 0, angles, last
    out, memory.keys, memory.values, *memory.scales = native.attention(queries, keys, values, None, heads, *past)
    made: mx.array = out
    return made


def heads_of(layer: Attention, dtype: mx.Dtype) -> Heads | None:
    """Return what an attention layer has, None if the extension does not take it."""
    part = layer.module
    rotation = rotation_of(part["rope"] if layer.rotates else None)
    if rotation is None or dtype not in TYPES or not layer.causal:
        return None
    heads = Heads(layer.heads, layer.kv_heads, part.scale, 0.0, None, None, *rotation, sinks=layer.sinks)
    if layer.norms is not None:
        queries, keys = layer.norms
        if "bias" in queries:
            return None
        heads = heads._replace(eps=queries.eps, q_norm=queries["weight"], k_norm=keys["weight"])
    if layer.value_scale is not None:
        heads = heads._replace(value_scale=layer.value_scale)
    if layer.query_scale is not None:
        period, beta = layer.query_scale
        heads = heads._replace(query_scales=_query_scales(beta, dtype), period=period)
    return heads


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


def _angles(heads: Heads, memory: KV, width: int) -> mx.array | None:
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
