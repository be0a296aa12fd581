"""Attention layers over mlx-lm's weights, and over keys and values of rows of different lengths.

A function here or in `latent_attention.py` adds the layer's output for x [B, W, H] to the residual, and returns the
sum and its norm. `mask` makes [B, 1, W, reach], what each token sees. With `last` [B] only that token of each row
is computed, [B, 1, H]; the others are only remembered.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..kernels import cpu
from ..kernels.attention import at_last, gated_attention
from ..kernels.products import product, products
from ..kernels.types import ArrangedHeads
from ..state import KV
from .residual import Residual

Mask = Callable[[], mx.array]


def attention(
    layer: nn.Module, x: mx.array, mask: Mask, memory: KV, residual: Residual, last: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Run Qwen3.5's attention, whose output has a gate. `mask` says the same as `memory.offset`."""
    if (native := cpu.native()) is not None:
        made = cpu.native_attention(native, layer, x, memory, last, residual.native)
        if made is not None:
            return residual.added(made)
    both, keys, values = products(x, layer.q_proj, layer.k_proj, layer.v_proj)  # `both`: queries and gates, by head
    out = gated_attention(layer, both, keys, values, memory, mask, last)
    return residual.add(product(out, layer.o_proj))


def gated_kv_sizes(layer: nn.Module) -> tuple[int, int, int]:
    return layer.num_key_value_heads, layer.head_dim, layer.head_dim


def arrange_heads(layer: nn.Module, heads: ArrangedHeads, offset: mx.array) -> ArrangedHeads:
    """Norm and rotate queries and keys, and scale queries and values, each where the layer does."""
    queries, keys, values = heads
    if "q_norm" in layer:
        queries, keys = layer.q_norm(queries), layer.k_norm(keys)
    if "rope" in layer:
        queries, keys = layer.rope(queries, offset=offset), layer.rope(keys, offset=offset)
    if (beta := getattr(layer, "scaling_beta", None)) is not None:  # Ministral 3: far from the start
        positions = offset[:, None] + mx.arange(queries.shape[2])  # [B, W]
        scale = 1 + beta * mx.log(1 + mx.floor(positions / float(layer.original_max_position_embeddings)))
        queries = queries * scale[:, None, :, None].astype(queries.dtype)
    if (value_scale := getattr(layer, "value_scale", None)) is not None:  # MiMo-V2-Flash
        values = values * value_scale
    return ArrangedHeads(queries, keys, values)


def grouped_attention(
    layer: nn.Module,
    x: mx.array,
    mask: Mask,
    memory: KV,
    residual: Residual,
    last: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Run grouped-query attention, with the norms, rotation, scales, sinks and gates that the layer has."""
    if (native := cpu.native()) is not None:
        made = cpu.native_grouped_attention(native, layer, x, memory, last, residual.native)
        if made is not None:
            return residual.added(made)
    B, W, _ = x.shape
    queries, keys, values = products(x, layer.q_proj, layer.k_proj, layer.v_proj)
    gates = product(x, layer.g_proj) if "g_proj" in layer else None  # Step's, one gate for a head, [B, W, H]
    if native is not None and x.dtype in cpu.TYPES and (given := cpu.grouped_heads(layer, x.dtype)) is not None:
        out = cpu.attend_window(native, given, queries, keys, values, memory, last, gates)
        return residual.add(product(out, layer.o_proj))
    counts = zip((queries, keys, values), (layer.n_heads, layer.n_kv_heads, layer.n_kv_heads), strict=True)
    heads = ArrangedHeads(*(a.reshape(B, W, count, -1).transpose(0, 2, 1, 3) for a, count in counts))
    queries, keys, values = arrange_heads(layer, heads, memory.offset)
    keys, values = memory.update_and_fetch(keys, values)
    seen = mask()
    if last is not None:
        queries, seen = at_last(queries, last, 2), at_last(seen, last, 2)
    sinks = layer.get("attention_sink_bias")
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=layer.scale, mask=seen, sinks=sinks)
    if gates is not None:
        gates = mx.sigmoid(gates if last is None else at_last(gates, last))
        out = out * gates.swapaxes(1, 2)[..., None]
    out = out.transpose(0, 2, 1, 3).reshape(B, out.shape[2], -1)
    return residual.add(product(out, layer.o_proj))


def grouped_kv_sizes(layer: nn.Module) -> tuple[int, int, int]:
    heads = layer.n_kv_heads
    return heads, layer.k_proj.weight.shape[0] // heads, layer.v_proj.weight.shape[0] // heads
