"""Attention to a window of tokens and to entries of whole blocks, by MLX's own operations (see `compressed.py`).

A row attends to the entries of blocks that it has reached the end of. The pass over a block's last token writes the
entry, whatever may come of that token: if it is a draft that is rejected, no row sees the entry, and the pass that
comes to the end of the block again writes over it. The numbers that entries are made of are kept for tokens of blocks
that may still end, with a window's drafts pending.
"""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..state import KV, Recurrent
from .compressed import CompressedAttention
from .experts import stock_experts
from .layers import Pass, Residual
from .recurrent import Recurrents, conv_history, last_inputs
from .selection import relu_scores, select_best
from .types import at_last

ALIGN = 64  # positions: windows begin at a multiple, so that scores are summed alike whatever a token is read with
PIECE = 64  # tokens of a prompt whose scores are an array


def rotate_last(x: mx.array, rope: nn.Module, offset: mx.array, *, back: bool = False) -> mx.array:
    """Return x [B, H, W, D] with its last numbers rotated by positions from `offset` [B] on, or turned back."""
    plain, turned = mx.split(x, [x.shape[-1] - rope.dims], axis=-1)
    freqs = rope.get("_freqs")
    turned = mx.fast.rope(
        turned,
        rope.dims,
        traditional=True,
        base=None if freqs is not None else rope.base,
        scale=-1.0 if back else 1.0,
        offset=offset,
        freqs=freqs,
    )
    return mx.concatenate([plain, turned], axis=-1)


def weighted_means(numbers: mx.array, weights: mx.array) -> mx.array:
    """Return the means [B, M, D] of numbers [B, M, S, D] by the softmax of weights [B, M, S, D] over S, in their
    type. Every sum is over an axis of its own length, whatever M is."""
    shares = mx.softmax(weights.astype(mx.float32).swapaxes(-1, -2), axis=-1)
    return (numbers.astype(mx.float32).swapaxes(-1, -2) * shares).sum(axis=-1).astype(numbers.dtype)


class CompressedAttentions(Recurrents):
    """DeepSeek-V4's attention layers."""

    def compressed_attention(
        self,
        layer: CompressedAttention,
        x: mx.array,
        memories: Sequence[KV | Recurrent],
        run: Pass,
        residual: Residual,
    ) -> tuple[mx.array, mx.array | None]:
        """Write a window [B, W, H] into the layer's memories and attend to what they hold."""
        part, (B, W, _), adapters = layer.module, x.shape, run.adapters
        tokens, *more = memories
        assert isinstance(tokens, KV)
        offset, seen = tokens.offset, None
        entries: KV | None = None
        low, key, *made = self.products(x, [part.q_a_proj, part.kv_proj, *_projections(layer)], adapters)
        low = self.norm(low, part.q_a_norm)
        queries = self.product(low, part.q_b_proj, adapters).reshape(B, W, layer.heads, -1)
        queries = mx.fast.rms_norm(queries, None, part.q_a_norm.eps).transpose(0, 2, 1, 3)
        queries = rotate_last(queries, part.rope, offset)
        key = rotate_last(self.norm(key, part.kv_norm)[:, None], part.rope, offset)
        tokens.write(*mx.split(key, [layer.head_sizes[0]], axis=-1))
        at = offset[:, None] + mx.arange(W)  # [B, W]
        if more:
            blocks, history = more
            assert isinstance(blocks, KV)
            assert isinstance(history, Recurrent)
            entries = blocks
            self.write_entries(layer, made, offset, entries, history, run)
            seen = at_last(self.select_entries(layer, x, low, at, entries, run), run.last)
        queries, at = at_last(queries, run.last, 2), at_last(at, run.last)
        out = self.attend_compressed(layer, queries, at, tokens, entries, seen)
        out = rotate_last(out, part.rope, at[:, 0], back=True).swapaxes(1, 2)  # [B, W, H, D]
        out = self.product_by_group(out.reshape(*out.shape[:2], layer.groups, -1), part.o_a_proj)
        return self.add(residual, self.product(out.flatten(-2), part.o_b_proj, adapters), run)

    def product_by_group(self, x: mx.array, layer: nn.Module) -> mx.array:
        """Return the product [B, W, G, N] of each group of x [B, W, G, K] with its own matrix of `layer`."""
        groups = mx.broadcast_to(mx.arange(x.shape[2], dtype=mx.uint32), x.shape[:3])
        made = self.expert_products(x, groups, None, False, [layer])  # each group has an expert of its own
        return stock_experts(x, groups, layer) if made is None else made[0]

    def write_entries(
        self,
        layer: CompressedAttention,
        made: Sequence[mx.array],
        offset: mx.array,
        entries: KV,
        history: Recurrent,
        run: Pass,
    ) -> None:
        """Write the entries of blocks that end in a window, of numbers and their weights [B, W, C] after the first
        `offset` [B] tokens; where an index selects, also those of its keys."""
        part, every, (B, W, _) = layer.module.compressor, layer.every, made[0].shape
        numbers, weights = (mx.concatenate(list(made[n::2]), axis=-1) for n in (0, 1))
        held, drafts = history.state, history.pending
        held = held if drafts is None else last_inputs(held, drafts[1], run.accepted)
        both = [mx.concatenate([held, numbers], axis=1)]
        both.append(mx.concatenate([conv_history(history, run.accepted), weights], axis=1))
        history.kept = None if run.keep is None else _until(both, run.keep, layer.before)
        history.pending = None if run.certain == W else [weights[:, run.certain :], numbers[:, run.certain :]]
        history.state, history.conv = _until(both, run.certain, layer.before)

        count = -(-W // every)  # of blocks from the one of the first token on: as many as can end here
        first = offset // every * every  # [B], position of the first block
        inner = mx.arange(count * every)
        own = (first - offset + layer.before)[:, None] + inner  # [B, M·S], places of the blocks' tokens
        parts = [mx.take_along_axis(a, mx.minimum(own, a.shape[1] - 1)[..., None], axis=1) for a in both]
        earlier = [mx.take_along_axis(a, (own - every)[..., None], axis=1) for a in both] if layer.overlaps else None
        exists = (first[:, None] + inner >= every)[..., None]  # of the block before each
        positions = (first[:, None] + mx.arange(0, count * every, every)).reshape(-1)
        found, start = [], 0
        for module in [part] if layer.indexer is None else [part, layer.indexer]:
            channels = module.position_bias.shape[-1]
            mine = slice(start, start + channels)
            bias = mx.tile(module.position_bias, (count, 1))
            given = [parts[0][..., mine], parts[1][..., mine].astype(mx.float32) + bias]
            if earlier is not None:
                less = mx.where(exists, earlier[1][..., mine].astype(mx.float32) + bias, -mx.inf)
                before = earlier[0][..., mine], less
                given = [_overlapping(*pair, every) for pair in zip(before, given, strict=True)]
            else:
                given = [mx.unflatten(a, 1, (count, every)) for a in given]
            entry = self.norm(weighted_means(*given), module.kv_norm)  # [B, M, D]
            turned = rotate_last(entry.reshape(B * count, 1, 1, -1), layer.module.rope, positions)
            found.append(turned.reshape(B, 1, count, -1))
            start += channels
        entries.write(*mx.split(found[0], [layer.head_sizes[0]], axis=-1))
        entries.update_index(found[1:])

    def select_entries(
        self, layer: CompressedAttention, x: mx.array, low: mx.array, at: mx.array, entries: KV, run: Pass
    ) -> mx.array:
        """Return which entries [B, W, N] tokens at positions [B, W] attend to. `low` [B, W, R] is what queries are
        projected from."""
        visible = mx.arange(entries.reach) < ((at + 1) // layer.every)[..., None]
        if layer.indexer is None or layer.budget is None or entries.reach <= layer.budget:
            return visible
        part, adapters = layer.indexer, run.adapters
        queries = self.product(low, part.q_b_proj, adapters).reshape(*x.shape[:2], part.heads, -1).swapaxes(1, 2)
        queries = rotate_last(queries, layer.module.rope, at[:, 0]).swapaxes(1, 2)  # [B, W, H, D]
        weights = self.product(x, part.scorer.weights_proj, adapters).astype(mx.float32)
        keys = entries.index[0][:, 0, : entries.reach]
        scores = relu_scores(queries, keys, weights * (part.heads * part.head_dim) ** -0.5)
        return select_best(scores, visible, layer.budget)

    def attend_compressed(
        self,
        layer: CompressedAttention,
        queries: mx.array,
        at: mx.array,
        tokens: KV,
        entries: KV | None,
        seen: mx.array | None,
    ) -> mx.array:
        """Return the attention [B, H, W, D] of queries [B, H, W, D] at positions [B, W] to the window's tokens, and
        to the entries that are `seen` [B, W, N]."""
        held, pieces = None if entries is None else entries.fetch(), []
        for start in range(0, queries.shape[2], PIECE):
            some, places = queries[:, :, start : start + PIECE], at[:, start : start + PIECE]
            keys, near = _window(layer.window, places, tokens)
            here = None if seen is None else seen[:, start : start + PIECE]
            pieces.append(_attend(layer, some, keys, near, held, here))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def _projections(layer: CompressedAttention) -> list[nn.Module]:
    """Return what projects to the numbers of entries and to their weights, then the same of the index."""
    if not layer.every:
        return []
    parts = [layer.module.compressor] + ([] if layer.indexer is None else [layer.indexer])
    return [part[name] for part in parts for name in ("kv_proj", "gate_proj")]


def _until(both: Sequence[mx.array], count: int, before: int) -> tuple[mx.array, mx.array]:
    """Return the last inputs [B, T, C] before the window's token `count`."""
    numbers, weights = (a[:, count : count + before] for a in both)
    return numbers, weights


def _overlapping(earlier: mx.array, own: mx.array, every: int) -> mx.array:
    """Return what blocks have of tokens [B, M·S, 2·D], of those before them and their own: [B, M, 2·S, D]."""
    first, second = (mx.unflatten(a, 1, (-1, every)) for a in (earlier, own))
    size = own.shape[-1] // 2
    return mx.concatenate([first[..., :size], second[..., size:]], axis=2)


def _window(size: int, at: mx.array, tokens: KV) -> tuple[mx.array, mx.array]:
    """Return the keys [B, C, D] of windows of tokens at `at` [B, W], and which of them each sees, [B, W, C]."""
    W = at.shape[1]
    count = min(-(-(size + ALIGN + W - 2) // ALIGN) * ALIGN, tokens.reach)
    first = mx.maximum(at[:, :1] - size + 1, 0) // ALIGN * ALIGN
    places = first + mx.arange(count)  # [B, C]
    keys = mx.concatenate([*tokens.take(mx.minimum(places, tokens.reach - 1))], axis=-1)[:, 0]
    places, at = places[:, None], at[..., None]
    return keys, (places <= at) & (places > at - size)


def _attend(
    layer: CompressedAttention,
    queries: mx.array,
    keys: mx.array,
    near: mx.array,
    held: tuple[mx.array, mx.array] | None,
    seen: mx.array | None,
) -> mx.array:
    """Attend to keys [B, C, D] that are `near` [B, W, C], and to what is `held` [B, 1, N, D] and `seen` [B, W, N]."""
    B, H, W, D = queries.shape
    rows, size = queries.reshape(B, H * W, D), layer.head_sizes[0]

    def masked(scores: mx.array, visible: mx.array) -> mx.array:
        scores = scores.astype(mx.float32).reshape(B, H, W, -1) * D**-0.5
        return mx.where(visible[:, None], scores, -mx.inf)

    scores = [masked(rows @ keys.swapaxes(-1, -2), near)]
    if held is not None:
        assert seen is not None
        plain, turned = (a[:, 0] for a in held)  # [B, N, …]
        found = rows[..., :size] @ plain.swapaxes(-1, -2) + rows[..., size:] @ turned.swapaxes(-1, -2)
        scores.append(masked(found, seen))
    sinks = layer.module.sinks.astype(mx.float32)[:, None, None]
    scores.append(mx.broadcast_to(sinks, (B, H, W, 1)))
    shares = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype).reshape(B, H * W, -1)
    count = keys.shape[1]
    out = shares[..., :count] @ keys
    if held is not None:
        far = shares[..., count:-1]
        out = out + mx.concatenate([far @ plain, far @ turned], axis=-1)
    return out.reshape(B, H, W, D)
