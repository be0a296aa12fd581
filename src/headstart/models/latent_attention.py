"""Multi-head latent attention (DeepSeek-V3): a token's keys and values are one latent vector and one rotated key.

mlx-lm expands the latents to keys and values where a pass has more than one token, and multiplies the queries by the
expansion where it has one. These round differently. A window must give the bits of plain decoding, so queries are
always multiplied.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..kernels import cpu
from ..kernels.attention import at_last
from ..kernels.products import product, products
from ..state import KV
from .attention import Mask
from .residual import Residual


def latent_attention(
    layer: nn.Module,
    x: mx.array,
    mask: Mask,
    memory: KV,
    residual: Residual,
    last: mx.array | None = None,
    *,
    scales: Callable[[nn.Module], tuple[float, float]] = lambda layer: (1.0, 1.0),
) -> tuple[mx.array, mx.array]:
    """Attend to latents [B, 1, S, R] and rotated keys [B, 1, S, D], see `attention.py`. `scales`: of queries and
    latents."""
    query_scale, latent_scale = scales(layer)
    if (native := cpu.native()) is not None:
        made = cpu.native_latent_attention(native, layer, x, scales(layer), memory, last, residual.native)
        if made is not None:
            return residual.added(made)
    B, W, _ = x.shape
    if layer.q_lora_rank is None:
        queries, compressed = products(x, layer.q_proj, layer.kv_a_proj_with_mqa)
    else:
        queries, compressed = products(x, layer.q_a_proj, layer.kv_a_proj_with_mqa)
        queries = product(layer.q_a_layernorm(queries), layer.q_b_proj)
    queries = queries.reshape(B, W, layer.num_heads, layer.q_head_dim).transpose(0, 2, 1, 3)
    if query_scale != 1:
        queries = queries * query_scale
    queries, rotated = mx.split(queries, [layer.qk_nope_head_dim], axis=-1)
    latents, keys = mx.split(compressed[:, None], [layer.kv_lora_rank], axis=-1)  # [B, 1, W, …]
    rotated, keys = layer.rope(rotated, memory.offset), layer.rope(keys, memory.offset)
    latents = layer.kv_a_layernorm(latents)
    latents, keys = memory.update_and_fetch(latents if latent_scale == 1 else latents * latent_scale, keys)
    seen = mask()
    if last is not None:
        queries, rotated, seen = (at_last(a, last, 2) for a in (queries, rotated, seen))
    scores = (rotated * layer.scale) @ keys.swapaxes(-1, -2)  # [B, H, W, S]
    scores = mx.where(seen, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    queries = layer.embed_q(queries)  # [B, H, W, R]
    out = mx.fast.scaled_dot_product_attention(queries, latents, latents, scale=layer.scale, mask=scores)
    out = layer.unembed_out(out).transpose(0, 2, 1, 3)
    return residual.add(product(out.reshape(B, out.shape[1], -1), layer.o_proj))


def latent_kv_sizes(layer: nn.Module) -> tuple[int, int, int]:
    return 1, layer.kv_lora_rank, layer.qk_rope_head_dim
