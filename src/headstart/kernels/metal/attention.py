"""Attention of a short window on Metal: see `attention.metal`."""

import math

import mlx.core as mx

from . import metal_kernel

SLICES = 8  # as in attention.metal
QUERIES = (1, 2, 4)  # window positions side by side


def metal_arrange(
    both: mx.array,
    keys: mx.array,
    values: mx.array,
    query_weight: mx.array,
    key_weight: mx.array,
    eps: float,
    dims: int,
    base: float,
    offset: mx.array,
) -> list[mx.array]:
    """Return queries [B, H, W, D], keys and values [B, Hkv, W, D] of queries and gates [B, W, H·2·D], keys and values
    [B, W, Hkv·D]: queries and keys normed, and rotated to the positions from `offset` [B] on."""
    B, W, _ = both.shape
    D = query_weight.shape[0]
    H, Hkv = both.shape[-1] // (2 * D), keys.shape[-1] // D
    source = f"""
        threadgroup float line[D];
        const int W = both_shape[1], head = int(threadgroup_position_in_grid.x);
        const int w = int(threadgroup_position_in_grid.y), b = int(threadgroup_position_in_grid.z);
        headstart::arrange<H, HKV, D, DIMS>(
            both, keys, values, query_weight, key_weight, {eps!r}f, {math.log2(base)!r}f, offset[b] + w, b, w, W,
            head, new_queries, new_keys, new_values, line, int(thread_index_in_simdgroup));
    """
    inputs = ("both", "keys", "values", "query_weight", "key_weight", "offset")
    outputs = ("new_queries", "new_keys", "new_values")
    return list(
        metal_kernel("arrange", inputs, outputs, source, "attention")(
            inputs=[both, keys, values, query_weight, key_weight, offset],
            template=[("T", both.dtype), ("H", H), ("HKV", Hkv), ("D", D), ("DIMS", dims)],
            grid=(32 * (H + 2 * Hkv), W, B),
            threadgroup=(32, 1, 1),
            output_shapes=[(B, H, W, D), (B, Hkv, W, D), (B, Hkv, W, D)],
            output_dtypes=[both.dtype] * 3,
        )
    )


def metal_attend(
    queries: mx.array, gates: mx.array, keys: mx.array, values: mx.array, offset: mx.array, scale: float
) -> mx.array:
    """Return the gated attention [B, W, H·D] of queries [B, H, W, D] over whole buffers of keys and values
    [B, Hkv, S, D]; query w of sequence b sees the positions up to `offset[b] + w`."""
    B, H, W, D = queries.shape
    count = next((size for size in QUERIES if W <= size), QUERIES[-1])
    source = f"""
        threadgroup float maxima[{SLICES}], weights[{SLICES}], partials[{SLICES} * D];
        const int h = int(threadgroup_position_in_grid.x), b = int(threadgroup_position_in_grid.z);
        headstart::attend<H, HKV, D, COUNT>(
            queries, keys, values, gates, {scale * math.log2(math.e)!r}f, offset[b], b, h,
            COUNT * int(threadgroup_position_in_grid.y), queries_shape[2], keys_shape[2], out, maxima, weights,
            partials, int(simdgroup_index_in_threadgroup), int(thread_index_in_simdgroup));
    """
    inputs = ("queries", "keys", "values", "gates", "offset")
    return metal_kernel("attend", inputs, ("out",), source, "attention")(
        inputs=[queries, keys, values, gates, offset],
        template=[("T", queries.dtype), ("H", H), ("HKV", keys.shape[1]), ("D", D), ("COUNT", count)],
        grid=(32 * SLICES * H, -(-W // count), B),
        threadgroup=(32 * SLICES, 1, 1),
        output_shapes=[(B, W, H * D)],
        output_dtypes=[queries.dtype],
    )[0]
