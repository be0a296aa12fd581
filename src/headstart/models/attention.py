"""Gated attention over mlx-lm's weights, and over keys and values of rows of different lengths (`state/kv.py`)."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels import cpu
from ..kernels.attention import Arranged, Norms, arrange, arranges, attend, attends
from ..kernels.products import product, products
from ..state import KV


def attention(layer: nn.Module, x: mx.array, mask: mx.array, memory: KV, last: mx.array | None = None) -> mx.array:
    """[B, W, H] → [B, W, H]. `mask` [B, 1, W, reach] says the same as `memory.offset`: all up to a token's own.
    With `last` [B] → [B, 1, H], of that token in each row; the others are only remembered."""
    B, W, _ = x.shape
    H, D, offset = layer.num_attention_heads, layer.head_dim, memory.offset
    both, keys, values = products(x, layer.q_proj, layer.k_proj, layer.v_proj)  # `both`: queries and gates, by head
    if (native := cpu.native()) is not None and cpu.attends(x.dtype, layer):
        return product(cpu.attend(native, layer, both, keys, values, memory, last), layer.o_proj)
    if arranges(layer.rope, D):
        norms = Norms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
        queries, keys, values = arrange(both, keys, values, norms, layer.rope, offset)
    else:
        queries, keys, values = arranged(layer, both, keys, values, offset)
    keys, values = memory.update_and_fetch(keys, values)
    if attends(W, H, memory.keys):
        out = attend(queries, both, memory.keys, memory.values, offset, layer.scale, memory.reach)
        return product(out if last is None else at_last(out, last), layer.o_proj)
    if last is not None:
        queries, both, mask, W = at_last(queries, last, 2), at_last(both, last), at_last(mask, last, 2), 1
    gates = both.reshape(B, W, H, 2 * D)[..., D:].reshape(B, W, -1)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=layer.scale, mask=mask)
    return product(out.transpose(0, 2, 1, 3).reshape(B, W, -1) * mx.sigmoid(gates), layer.o_proj)


def at_last(x: mx.array, last: mx.array, axis: int = 1) -> mx.array:
    """x at index `last` [B] of each row along an axis, which stays with a length of one."""
    return mx.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), axis=axis)


def arranged(layer: nn.Module, both: mx.array, keys: mx.array, values: mx.array, offset: mx.array) -> Arranged:
    """`arrange` in stock ops."""
    B, W, _ = both.shape
    queries = both.reshape(B, W, layer.num_attention_heads, -1)[..., : layer.head_dim]
    keys, values = (a.reshape(B, W, layer.num_key_value_heads, -1) for a in (keys, values))
    queries = layer.rope(layer.q_norm(queries).transpose(0, 2, 1, 3), offset=offset)
    keys = layer.rope(layer.k_norm(keys).transpose(0, 2, 1, 3), offset=offset)
    return Arranged(queries, keys, values.transpose(0, 2, 1, 3))
