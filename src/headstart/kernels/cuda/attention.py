"""Gated attention of a short window, whose rows depend on nothing but themselves (see attention.cu).

Stock attention picks its kernel, and with it the order of its sums, by the width of the window and the capacity.
"""

import math
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..types import ArrangedHeads, HeadNorms
from .device import launch, make_kernel, on_cuda

WIDEST = 16  # windows; beyond, stock attention is the faster one
SPLIT, WARPS, TILE, PAD = 128, 8, 16, 8  # as in attention.cu


def arrange_fits(rope: nn.Module, dim: int) -> bool:
    """Return whether `launch_arrange` takes heads of `dim`, rotated by this module, on this device."""
    plain = type(rope) is nn.RoPE and not rope.traditional and rope.scale == 1
    return on_cuda() and plain and dim % 32 == 0


def launch_arrange(
    both: mx.array, keys: mx.array, values: mx.array, norms: HeadNorms, rope: nn.RoPE, offset: mx.array
) -> ArrangedHeads:
    """Queries and gates [B, W, H·2·D], keys and values [B, W, Hkv·D] → by head, normed, and rotated to the positions
    from `offset` [B] on. One kernel where stock ops take a split, two norms, two rotations and their copies."""
    B, W, _ = both.shape
    D = norms.queries.shape[0]
    H, Hkv = both.shape[-1] // (2 * D), keys.shape[-1] // D
    made = launch(
        _arrange(norms.eps, rope.base),
        [both, keys, values, norms.queries, norms.keys, offset],
        {"T": both.dtype, "H": H, "HKV": Hkv, "D": D, "DIMS": rope.dims},
        (-(-B * W * (H + 2 * Hkv) // WARPS), 1, 1),
        32 * WARPS,
        [((B, heads, W, D), both.dtype) for heads in (H, Hkv, Hkv)],
    )
    return ArrangedHeads(*made)


def attention_fits(width: int, heads: int, keys: mx.array) -> bool:
    """Return whether `launch_attention` takes this window of `heads` query heads over `keys` [B, Hkv, S, D] here."""
    _, Hkv, _, D = keys.shape
    fits = width <= WIDEST and heads % Hkv == 0 and D % 32 == 0 and D <= 256
    return on_cuda() and fits and keys.dtype in (mx.bfloat16, mx.float16)


def launch_attention(
    queries: mx.array, gates: mx.array, keys: mx.array, values: mx.array, offset: mx.array, scale: float, reach: int
) -> mx.array:
    """Queries [B, H, W, D] over whole buffers of keys and values [B, Hkv, S, D] → [B, W, H·D], times the sigmoid of
    the second half of each head of `gates` [B, W, H·2·D].

    Query w of row b sees the positions up to `offset[b] + w`, none of them beyond `reach`. The stock-op twin is
    stock attention and a multiplication, in `kernels.attention`.
    """
    B, H, W, D = queries.shape
    Hkv, pieces = keys.shape[1], -(-reach // SPLIT)
    template = {"T": queries.dtype, "H": H, "HKV": Hkv, "D": D}
    lines = (B, Hkv, pieces, (H // Hkv) * W)
    partial, weights = launch(
        _partials(scale, D),
        [queries, keys, values, offset],
        template,
        (pieces, Hkv, B),
        32 * WARPS,
        [((*lines, D), mx.float32), ((*lines, 2), mx.float32)],
    )
    inputs, output = [partial, weights, gates, offset], ((B, W, H * D), queries.dtype)
    return launch(_merge(), inputs, template, (H * W, B, 1), D, [output])[0]


@cache
def _arrange(eps: float, base: float) -> Any:
    call = f"""
        headstart::arrange<H, HKV, D, DIMS>(
            both, keys, values, query_weight, key_weight, offset, {eps!r}f, {math.log2(base)!r}f, both_shape[0],
            both_shape[1], new_queries, new_keys, new_values);
    """
    inputs, outputs = "both keys values query_weight key_weight offset", "new_queries new_keys new_values"
    return make_kernel("attention_arrange", inputs, outputs, "tensor_core attention", call)


@cache
def _partials(scale: float, D: int) -> Any:
    call = f"""
        headstart::partials<H, HKV, D>(
            queries, keys, values, offset, {scale * math.log2(math.e)!r}f, queries_shape[2], keys_shape[2],
            partial, weights);
    """
    elements = 2 * SPLIT * (D + PAD) + TILE * (D + PAD) + TILE * (SPLIT + PAD)
    shared = 2 * elements + 2 * 4 * WARPS * TILE
    inputs, outputs = "queries keys values offset", "partial weights"
    return make_kernel("attention_partials", inputs, outputs, "tensor_core attention", call, shared)


@cache
def _merge() -> Any:
    call = "headstart::merge<H, HKV, D>(partial, weights, gates, offset, gates_shape[1], partial_shape[2], out);"
    return make_kernel("attention_merge", "partial weights gates offset", "out", "tensor_core attention", call)
