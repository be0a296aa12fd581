"""Gated attention between a layer's projections: cpu, cuda, metal or stock ops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import cpu, metal
from .cuda.attention import arrange_fits, attention_fits, launch_arrange, launch_attention
from .metal.attention import WIDEST, heads_shape, metal_arrange, metal_attend
from .types import ArrangedHeads, HeadNorms


def gated_attention(
    layer: nn.Module,
    both: mx.array,
    keys: mx.array,
    values: mx.array,
    memory: Any,
    mask: Callable[[], mx.array],
    last: mx.array | None = None,
) -> mx.array:
    """Write keys and values [B, W, Hkv·D] into `memory` (see `state/kv.py`) and attend to it with the queries of
    `both` [B, W, H·2·D], by head queries and gates → [B, W, H·D], or of token `last` [B] of each row [B, 1, H·D]."""
    W = both.shape[1]
    H, D, offset = layer.num_attention_heads, layer.head_dim, memory.offset
    start = offset if memory.start is None else memory.start
    native = cpu.native() if both.dtype in cpu.TYPES else None
    if native is not None and (heads := cpu.gated_heads(layer)) is not None:
        return cpu.attend_window(native, heads, both, keys, values, memory, last)
    shape = heads_shape(layer, both.dtype) if metal.on_metal() else None
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
    if memory.positions is not None:
        queries, keys, values = stock_arrange(layer, both, keys, values, start, memory.positions)
    elif arrange_fits(layer.rope, D):
        queries, keys, values = launch_arrange(both, keys, values, norms, layer.rope, start)
    elif shape is not None and metal.chosen_kernel("heads", shape) == "metal":
        queries, keys, values = metal_arrange(both, keys, values, norms, layer.rope, start)
    else:
        queries, keys, values = stock_arrange(layer, both, keys, values, start)
    keys, values = memory.update_and_fetch(keys, values)
    if attention_fits(W, H, memory.keys):
        out = launch_attention(queries, both, memory.keys, memory.values, offset, layer.scale, memory.reach)
        return out if last is None else at_last(out, last)
    fits = W <= WIDEST and not memory.eight_bits
    if shape is not None and fits and metal.chosen_kernel("attention", shape) == "metal":
        out = metal_attend(queries, both, memory.keys, memory.values, offset, layer.scale, memory.reach)
        return out if last is None else at_last(out, last)
    seen = mask()
    if last is not None:
        queries, both, seen, W = at_last(queries, last, 2), at_last(both, last), at_last(seen, last, 2), 1
    return stock_attention(queries, both, keys, values, layer.scale, seen)


def stock_attention(
    queries: mx.array, both: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """Return stock attention of queries [B, H, W, D], times the sigmoid of the gates in `both` → [B, W, H·D]."""
    B, H, W, D = queries.shape
    gates = both.reshape(B, W, H, 2 * D)[..., D:].reshape(B, W, -1)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return out.transpose(0, 2, 1, 3).reshape(B, W, -1) * mx.sigmoid(gates)


def stock_arrange(
    layer: nn.Module, both: mx.array, keys: mx.array, values: mx.array, offset: mx.array, positions: Any = None
) -> ArrangedHeads:
    """Do what `launch_arrange` does in stock ops, at `positions` (see `rotate_at`) if they are given."""
    rope = partial(layer.rope, offset=offset) if positions is None else partial(rotate_at, layer.rope, positions)
    B, W, _ = both.shape
    queries = both.reshape(B, W, layer.num_attention_heads, -1)[..., : layer.head_dim]
    keys, values = (a.reshape(B, W, layer.num_key_value_heads, -1) for a in (keys, values))
    queries = rope(layer.q_norm(queries).transpose(0, 2, 1, 3))
    keys = rope(layer.k_norm(keys).transpose(0, 2, 1, 3))
    return ArrangedHeads(queries, keys, values.transpose(0, 2, 1, 3))


def rotate_at(rope: nn.Module, positions: Any, x: mx.array) -> mx.array:
    """Return x [B, H, W, D] with every token rotated by its own positions (`TokenPositions`).

    Tokens are rotated as if each were a sequence of its own, so that their bits are those of an ordinary rotation.
    """
    B, H, W, D = x.shape
    tokens = x.transpose(0, 2, 1, 3).reshape(B * W, H, 1, D)
    by_time, by_row, by_column = (rope(tokens, offset=positions.ids[:, axis].reshape(-1)) for axis in range(3))
    axes = mx.array([*positions.axes * 2, *[0] * (D - 2 * len(positions.axes))])  # [D]
    turned = mx.where(axes == 1, by_row, mx.where(axes == 2, by_column, by_time))
    return turned.reshape(B, W, H, D).transpose(0, 2, 1, 3)


def at_last(x: mx.array, last: mx.array, axis: int = 1) -> mx.array:
    """Return x at index `last` [B] of each row along an axis, which stays with a length of one."""
    return mx.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), axis=axis)
