"""Attention of a short window on Metal: see `attention.metal`."""

import math

import mlx.core as mx
import mlx.nn as nn

from ..types import ArrangedHeads, HeadNorms
from .device import metal_kernel, type_name

WIDEST = 16  # windows; beyond, stock attention is the faster one
SLICES = 8  # as in attention.metal
SPLIT = 256  # positions of a piece
QUERIES = (1, 2, 4)  # window positions side by side
ORDER = 8  # numbers that one kernel hands to the next: MLX passes fewer in another address space


def heads_shape(layer: nn.Module, dtype: mx.Dtype) -> str:
    rope = layer.rope
    rotation = f"{rope.dims} rotated" if is_plain_rope(rope) else type(rope).__name__
    heads, kv_heads = layer.num_attention_heads, layer.num_key_value_heads
    return f"{heads} queries, {kv_heads} keys of {layer.head_dim}, {rotation}, {type_name(dtype)}"


def is_plain_rope(rope: nn.Module) -> bool:
    """Return whether `metal_arrange` rotates as this module does."""
    return type(rope) is nn.RoPE and not rope.traditional and rope.scale == 1


def metal_arrange(
    both: mx.array, keys: mx.array, values: mx.array, norms: HeadNorms, rope: nn.RoPE, offset: mx.array
) -> ArrangedHeads:
    """Queries and gates [B, W, H·2·D], keys and values [B, W, Hkv·D] → by head, normed, and rotated to the positions
    from `offset` [B] on."""
    B, W, _ = both.shape
    D = norms.queries.shape[0]
    H, Hkv = both.shape[-1] // (2 * D), keys.shape[-1] // D
    source = f"""
        threadgroup float line[D];
        const int W = both_shape[1], head = int(threadgroup_position_in_grid.x);
        const int w = int(threadgroup_position_in_grid.y), b = int(threadgroup_position_in_grid.z);
        headstart::arrange<H, HKV, D, DIMS>(
            both, keys, values, query_weight, key_weight, {norms.eps!r}f, {math.log2(rope.base)!r}f, offset[b] + w, b,
            w, W, head, new_queries, new_keys, new_values, line, int(thread_index_in_simdgroup));
    """
    inputs = ("both", "keys", "values", "query_weight", "key_weight", "offset")
    outputs = ("new_queries", "new_keys", "new_values")
    return ArrangedHeads(
        *metal_kernel("arrange", inputs, outputs, source, "attention")(
            inputs=[both, keys, values, norms.queries, norms.keys, offset],
            template=[("T", both.dtype), ("H", H), ("HKV", Hkv), ("D", D), ("DIMS", rope.dims)],
            grid=(32 * (H + 2 * Hkv), W, B),
            threadgroup=(32, 1, 1),
            output_shapes=[(B, H, W, D), (B, Hkv, W, D), (B, Hkv, W, D)],
            output_dtypes=[both.dtype] * 3,
        )
    )


def heads_refusal(layer: nn.Module) -> str | None:
    """Return why the kernels do not take the heads of a layer; None if they do."""
    if layer.num_attention_heads < 2:
        return "fewer than 2 query heads"
    if layer.num_attention_heads % layer.num_key_value_heads:
        return "query heads are no multiple of key heads"
    fits = layer.head_dim % 32 == 0 and layer.head_dim <= 256
    return None if fits else f"heads of {layer.head_dim} are not of 32 to 256, in multiples of 32"


def metal_attend(
    queries: mx.array, gates: mx.array, keys: mx.array, values: mx.array, offset: mx.array, scale: float, reach: int
) -> mx.array:
    """Queries [B, H, W, D] over whole buffers of keys and values [B, Hkv, S, D] → [B, W, H·D], times the sigmoid of
    the second half of each head of `gates` [B, W, H·2·D]. Query w of sequence b sees the positions up to
    `offset[b] + w`, none of them beyond `reach`."""
    B, H, W, D = queries.shape
    source = """
        const auto products = headstart::arrangement(queries, queries, queries, queries, 0.0f, 0.0f, 0);
        device T* const new_keys = nullptr;
        device T* const new_values = nullptr;
    """
    given = {"queries": queries, "keys": keys, "values": values, "offset": offset}
    return _attend(source, given, gates, (B, W, H, D), None, scale, reach)[0]


def metal_attend_into(
    both: mx.array,
    keys: mx.array,
    values: mx.array,
    norms: HeadNorms,
    rope: nn.RoPE,
    cache: tuple[mx.array, mx.array],
    offset: mx.array,
    start: mx.array,
    scale: float,
    reach: int,
    before: mx.array,
) -> tuple[mx.array, mx.array]:
    """Arrange queries and gates [B, W, H·2·D], keys and values [B, W, Hkv·D], rotated to the positions from `start`
    [B] on; write the window at `offset` [B] into a cache [B, Hkv, S, D], in place; and attend to it.

    MLX orders kernels on Metal by the arrays that they put out, and knows of none here. Each such kernel takes as
    `before` what the last one put out for that, [ORDER], and the next is given the second result. What only reads the
    cache must wait for the device.
    """
    B, W, _ = both.shape
    D = norms.queries.shape[0]
    source = f"""
        const auto products = headstart::arrangement(
            fresh_keys, fresh_values, query_weight, key_weight, {norms.eps!r}f, {math.log2(rope.base)!r}f, start[b]);
        device T* const new_keys = const_cast<device T*>(keys);
        device T* const new_values = const_cast<device T*>(values);
        if (h + piece + b + w0 == 0 && thread_index_in_threadgroup < {ORDER})
            after[thread_index_in_threadgroup] = before[thread_index_in_threadgroup];
    """
    given = {
        "queries": both, "fresh_keys": keys, "fresh_values": values, "query_weight": norms.queries,
        "key_weight": norms.keys, "keys": cache[0], "values": cache[1], "offset": offset, "start": start,
        "before": before,
    }  # fmt: skip
    out, after = _attend(source, given, both, (B, W, both.shape[-1] // (2 * D), D), rope, scale, reach)
    return out, after


def _attend(
    source: str,
    given: dict[str, mx.array],
    gates: mx.array,
    shape: tuple[int, int, int, int],
    rope: nn.RoPE | None,
    scale: float,
    reach: int,
) -> list[mx.array]:
    """Launch `attend`, and `merge` where there are several pieces. Returns [B, W, H·D], and what the kernel puts out
    beside. `source` says where keys and values come from and go to; with `rope` they are arranged."""
    (B, W, H, D), arranges = shape, rope is not None
    count = next((size for size in QUERIES if W <= size), QUERIES[-1])
    groups, pieces = -(-W // count), max(1, -(-reach // SPLIT))
    whole = pieces == 1
    if whole and not arranges:
        given = given | {"gates": gates}
    source = f"""
        threadgroup float maxima[{SLICES}], weights[{SLICES}], partials[{SLICES} * D];
        const int h = int(threadgroup_position_in_grid.x), piece = int(threadgroup_position_in_grid.y);
        const int W = queries_shape[{1 if arranges else 2}], groups = (W + COUNT - 1) / COUNT;
        const int b = int(threadgroup_position_in_grid.z) / groups;
        const int w0 = int(threadgroup_position_in_grid.z) % groups * COUNT;
        {source}
        headstart::attend<H, HKV, D, DIMS, SPLIT, COUNT, {str(whole).lower()}, {str(arranges).lower()}>(
            queries, products, keys, values, new_keys, new_values, {"gates" if "gates" in given else "queries"},
            {scale * math.log2(math.e)!r}f, offset[b], b, h, w0, W, keys_shape[2], piece,
            int(threadgroups_per_grid.y), out, {"static_cast<device float*>(nullptr)" if whole else "stats"}, maxima,
            weights, partials, int(simdgroup_index_in_threadgroup), int(thread_index_in_simdgroup));
    """
    sizes = {"H": H, "HKV": given["keys"].shape[1], "D": D, "DIMS": rope.dims if rope is not None else 0}
    shapes = [(B, W, H * D)] if whole else [(B, W, H, pieces, D), (B, W, H, pieces, 2)]
    outputs = ("out", *["stats"] * (not whole), *["after"] * arranges)
    out, *others = metal_kernel("attend", tuple(given), outputs, source, "attention")(
        inputs=list(given.values()),
        template=[("T", gates.dtype), *sizes.items(), ("SPLIT", SPLIT), ("COUNT", count)],
        grid=(32 * SLICES * H, pieces, B * groups),
        threadgroup=(32 * SLICES, 1, 1),
        output_shapes=[*shapes, *[(ORDER,)] * arranges],
        output_dtypes=[*([gates.dtype] if whole else [mx.float32] * 2), *[mx.float32] * arranges],
    )
    return [out if whole else _merge(out, others[0], gates, given["offset"]), *others[1 - whole :]]


def _merge(partial: mx.array, stats: mx.array, gates: mx.array, offset: mx.array) -> mx.array:
    B, W, H, _, D = partial.shape
    source = """
        const int d = int(thread_position_in_threadgroup.x), pieces = partial_shape[3];
        const int h = int(threadgroup_position_in_grid.x), w = int(threadgroup_position_in_grid.y);
        const int b = int(threadgroup_position_in_grid.z), count = (offset[b] + w) / SPLIT + 1;
        const long at = (static_cast<long>(b) * gates_shape[1] + w) * H + h;
        const device float* from = stats + at * pieces * 2;
        const float gate = static_cast<float>(gates[at * 2 * D + D + d]);
        out[at * D + d] = static_cast<T>(
            headstart::merged(from, from + 1, partial + at * pieces * D + d, 2, D, count, gate));
    """
    made: mx.array = metal_kernel("merge", ("partial", "stats", "gates", "offset"), ("out",), source, "attention")(
        inputs=[partial, stats, gates, offset],
        template=[("T", gates.dtype), ("H", H), ("D", D), ("SPLIT", SPLIT)],
        grid=(D * H, W, B),
        threadgroup=(D, 1, 1),
        output_shapes=[(B, W, H * D)],
        output_dtypes=[gates.dtype],
    )[0]
    return made
