"""Gated attention of a short window, whose rows depend on nothing but themselves (see attention.cu).

Stock attention picks its kernel, and with it the order of its sums, by the width of the window and the capacity.
"""

import math
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ..layers import Attention
from ..types import ArrangedHeads, HeadNorms
from .compiler import cuda_kernel
from .device import include

WIDEST = 16  # windows; beyond, stock attention is the faster one
SPLIT, WARPS, TILE, PAD = 128, 8, 16, 8  # as in attention.cu


def arrange_fits(layer: Attention) -> bool:
    """Return whether `launch_arrange` takes the heads of a layer."""
    key, value = layer.head_sizes
    return layer.plain_rope is not None and layer.norms is not None and key == value and key % 32 == 0


def launch_arrange(
    both: mx.array,
    keys: mx.array,
    values: mx.array,
    norms: HeadNorms,
    rope: nn.RoPE,
    offset: mx.array,
    gated: bool = True,
) -> ArrangedHeads:
    """Queries and, where they are `gated`, gates [B, W, H·2·D], keys and values [B, W, Hkv·D] → by head, normed, and
    rotated to the positions from `offset` [B] on. One kernel where stock ops take a split, two norms, two rotations
    and their copies."""
    B, W, _ = both.shape
    D, parts = norms.queries.shape[0], 1 + gated
    H, Hkv = both.shape[-1] // (parts * D), keys.shape[-1] // D
    blocks = -(-B * W * (H + 2 * Hkv) // WARPS)
    return ArrangedHeads(
        *_arrange(norms.eps, rope.base)(
            inputs=[both, keys, values, norms.queries, norms.keys, offset],
            template=[("T", both.dtype), ("H", H), ("HKV", Hkv), ("D", D), ("DIMS", rope.dims), ("PARTS", parts)],
            grid=(32 * WARPS * blocks, 1, 1),
            threadgroup=(32 * WARPS, 1, 1),
            output_shapes=[(B, H, W, D), (B, Hkv, W, D), (B, Hkv, W, D)],
            output_dtypes=[both.dtype] * 3,
        )
    )


def launch_arrange_into(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    norms: HeadNorms,
    rope: nn.RoPE,
    offset: mx.array,
    cached: tuple[mx.array, mx.array],
) -> ArrangedHeads:
    """Arrange queries without gates, and write keys and values at `offset` into buffers [B, Hkv, S, D], in place.
    Returns the queries and those buffers: only what also takes these queries is sure to run after the kernel."""
    (B, W, _), D = queries.shape, norms.queries.shape[0]
    H, Hkv = queries.shape[-1] // D, keys.shape[-1] // D
    blocks = -(-B * W * (H + 2 * Hkv) // WARPS)
    (arranged,) = _arrange(norms.eps, rope.base, in_place=True)(
        inputs=[queries, keys, values, norms.queries, norms.keys, offset, *cached],
        template=[("T", queries.dtype), ("H", H), ("HKV", Hkv), ("D", D), ("DIMS", rope.dims), ("PARTS", 1)],
        grid=(32 * WARPS * blocks, 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
        output_shapes=[(B, H, W, D)],
        output_dtypes=[queries.dtype],
    )
    return ArrangedHeads(arranged, *mx.depends(list(cached), [arranged]))


def attention_fits(layer: Attention) -> bool:
    """Return whether `launch_attention` takes the heads of a layer, in windows of up to WIDEST."""
    key, value = layer.head_sizes
    return layer.sinks is None and layer.heads % layer.kv_heads == 0 and key == value and key % 32 == 0 and key <= 256


def launch_attention(
    queries: mx.array,
    gates: mx.array | None,
    keys: mx.array,
    values: mx.array,
    offset: mx.array,
    scale: float,
    reach: int,
    causal: bool = True,
    window: int | None = None,
) -> mx.array:
    """Queries [B, H, W, D] over whole buffers of keys and values [B, Hkv, S, D] → [B, W, H·D], times the sigmoid of
    the second half of each head of `gates` [B, W, H·2·D].

    Query w of row b sees the positions up to `offset[b] + w`, or, where it is not `causal`, to the end of the window;
    those less than `window` away; and none of them beyond `reach`.
    """
    B, H, W, D = queries.shape
    Hkv, pieces = keys.shape[1], -(-reach // SPLIT)
    template = [("T", queries.dtype), ("H", H), ("HKV", Hkv), ("D", D)]
    lines = (B, Hkv, pieces, (H // Hkv) * W)
    partial, weights = _partials(scale, D)(
        inputs=[queries, keys, values, offset],
        template=[*template, ("CAUSAL", int(causal)), ("WINDOW", window or 0)],
        grid=(32 * WARPS * pieces, Hkv, B),
        threadgroup=(32 * WARPS, 1, 1),
        output_shapes=[(*lines, D), (*lines, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = _merge(gates is not None)(
        inputs=[partial, weights, *([] if gates is None else [gates]), offset],
        template=[*template, ("CAUSAL", int(causal))],
        grid=(D * H * W, B, 1),
        threadgroup=(D, 1, 1),
        output_shapes=[(B, W, H * D)],
        output_dtypes=[queries.dtype],
    )
    return out


@cache
def _arrange(eps: float, base: float, in_place: bool = False):  # type: ignore[no-untyped-def]
    cached = ["cached_keys", "cached_values"] if in_place else []
    to = ", ".join(f"const_cast<T*>({name})" for name in cached) or "new_keys, new_values"
    place = "cached_keys_shape[2], true" if in_place else "both_shape[1], false"
    return cuda_kernel(
        name=f"attention_arrange{'_into' * in_place}",
        input_names=["both", "keys", "values", "query_weight", "key_weight", "offset", *cached],
        output_names=["new_queries", *["new_keys", "new_values"] * (not in_place)],
        source=f"""
            __shared__ float lines[headstart::WARPS][D];
            const int warp = threadIdx.x / 32;
            headstart::arrange<H, HKV, D, DIMS, PARTS>(
                blockIdx.x * headstart::WARPS + warp, lines[warp], both, keys, values, query_weight, key_weight,
                offset, {eps!r}f, {math.log2(base)!r}f, both_shape[0], both_shape[1], new_queries, {to}, {place});
        """,
        header=include("tensor_core", "team", "operand", "attention"),
    )


@cache
def _partials(scale: float, D: int):  # type: ignore[no-untyped-def]
    elements = 2 * SPLIT * (D + PAD) + TILE * (D + PAD) + TILE * (SPLIT + PAD)
    return cuda_kernel(
        name="attention_partials",
        input_names=["queries", "keys", "values", "offset"],
        output_names=["partial", "weights"],
        source=f"""
            extern __shared__ __align__(128) unsigned char dynamic_shared[];
            headstart::partials<H, HKV, D>(
                headstart::Team::block(0, 1), dynamic_shared, blockIdx.x, gridDim.x, blockIdx.y, blockIdx.z, queries,
                keys, values, offset, {scale * math.log2(math.e)!r}f, queries_shape[2], keys_shape[2],
                partial, weights, CAUSAL, WINDOW);
        """,
        header=include("tensor_core", "team", "operand", "attention"),
        shared_memory=2 * elements + 2 * 4 * WARPS * TILE,
    )


@cache
def _merge(gated: bool):  # type: ignore[no-untyped-def]
    gates = "gates" if gated else "static_cast<const T*>(nullptr)"
    return cuda_kernel(
        name=f"attention_merge{'_gated' * gated}",
        input_names=["partial", "weights", *["gates"] * gated, "offset"],
        output_names=["out"],
        source=f"""
            __shared__ __align__(16) float shared[headstart::MERGE_FLOATS<D>];
            headstart::merge<H, HKV, D>(
                headstart::Team::block(0, 1), shared, blockIdx.x % H, blockIdx.x / H, blockIdx.y, partial, weights,
                {gates}, offset, partial_shape[3] / (H / HKV), partial_shape[2], out, CAUSAL);
        """,
        header=include("tensor_core", "team", "operand", "attention"),
    )
