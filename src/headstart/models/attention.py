"""Gated attention over mlx-lm's weights, and over keys and values of rows of different lengths (`state/kv.py`)."""

import mlx.core as mx
import mlx.nn as nn

from ..kernels.attention import attend, attends
from ..kernels.products import product, products
from ..state import KV


def attention(layer: nn.Module, x: mx.array, mask: mx.array, memory: KV) -> mx.array:
    """[B, W, H] → [B, W, H]. `mask` [B, 1, W, reach] says the same as `memory.offset`: all up to a token's own."""
    B, W, _ = x.shape
    both, keys, values = products(x, layer.q_proj, layer.k_proj, layer.v_proj)  # `both`: queries and gates, by head
    queries, gates = mx.split(both.reshape(B, W, layer.num_attention_heads, -1), 2, axis=-1)
    keys = keys.reshape(B, W, layer.num_key_value_heads, -1)
    values = values.reshape(B, W, layer.num_key_value_heads, -1).transpose(0, 2, 1, 3)
    queries = layer.rope(layer.q_norm(queries).transpose(0, 2, 1, 3), offset=memory.offset)
    keys = layer.rope(layer.k_norm(keys).transpose(0, 2, 1, 3), offset=memory.offset)
    keys, values = memory.update_and_fetch(keys, values)
    if attends(W, layer.num_attention_heads, memory.keys):
        out = attend(queries, both, memory.keys, memory.values, memory.offset, layer.scale, memory.reach)
    else:
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=layer.scale, mask=mask)
        out = out.transpose(0, 2, 1, 3).reshape(B, W, -1) * mx.sigmoid(gates.reshape(B, W, -1))
    return product(out, layer.o_proj)
