"""Attention layers over keys and values of rows of different lengths, by MLX's own operations."""

from functools import partial
from typing import Literal

import mlx.core as mx

from ..state import KV
from ..state.kv import TokenPositions
from .experts import FeedForwards
from .layers import Attention, LatentAttention, Pass, Residual, SelectedAttention
from .selection import block_means, pooled_keys, relu_scores, select_best, select_tokens
from .types import ArrangedHeads, at_last


def rotate_at(rope: object, positions: TokenPositions, x: mx.array) -> mx.array:
    """Return x [B, H, W, D] with every token rotated by its own positions.

    Tokens are rotated as if each were a sequence of its own, so that their bits are those of an ordinary rotation.
    """
    B, H, W, D = x.shape
    assert callable(rope)
    tokens = x.transpose(0, 2, 1, 3).reshape(B * W, H, 1, D)
    by_time, by_row, by_column = (rope(tokens, offset=positions.ids[:, axis].reshape(-1)) for axis in range(3))
    axes = mx.array([*positions.axes * 2, *[0] * (D - 2 * len(positions.axes))])  # [D]
    turned = mx.where(axes == 1, by_row, mx.where(axes == 2, by_column, by_time))
    return turned.reshape(B, W, H, D).transpose(0, 2, 1, 3)


def rotate_by(x: mx.array, ids: mx.array, base: float, axes: tuple[int, ...]) -> mx.array:
    """Return x [..., D] in float32, rotated by the positions `ids` [..., 3]: half of what turns is `axes` long."""
    count = len(axes)
    angles = ids[..., mx.array(axes)].astype(mx.float32) * base ** (-mx.arange(count) / count)
    cosine, sine = mx.cos(angles), mx.sin(angles)
    first, second, rest = mx.split(x.astype(mx.float32), [count, 2 * count], axis=-1)
    return mx.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


class Attentions(FeedForwards):
    """Attention layers.

    A layer is given x [B, W, H] and returns the residual stream with its output, and the norm of that. `both` are the
    queries [B, W, H·D], or, by head, queries and gates [B, W, H·2·D] where the layer is gated.
    """

    def attention(
        self, layer: Attention, x: mx.array, memory: KV, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Run grouped-query attention: write the window into `memory` and attend to it."""
        part = layer.module
        if layer.writes:
            out = self.attend(layer, *self.project(layer, x, run), memory, run)  # [B, W, H·D]
        else:
            out = self.attend_shared(layer, self.product(x, part.q_proj, run.adapters), memory, run)
        if (projection := layer.head_gates) is not None:
            gates = mx.sigmoid(self.product(at_last(x, run.last), projection, run.adapters))  # [B, W, H]
            by_head = out.reshape(*gates.shape, -1)
            out = (by_head * gates[..., None]).reshape(out.shape)
        return self.add(residual, self.product(out, part.o_proj, run.adapters), run)

    def project(self, layer: Attention, x: mx.array, run: Pass) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries, keys and values of x [B, W, H]; values normed where the layer does that."""
        part = layer.module
        names = ("q_proj", "k_proj") if layer.values_are_keys else ("q_proj", "k_proj", "v_proj")
        both, keys, *rest = self.products(x, [part[name] for name in names], run.adapters)
        values = rest[0] if rest else keys
        if layer.value_norm is not None:
            by_head = values.reshape(*values.shape[:2], layer.kv_heads, -1)
            values = self.norm(by_head, layer.value_norm).reshape(values.shape)
        return both, keys, values

    def attend_shared(self, layer: Attention, queries: mx.array, memory: KV, run: Pass) -> mx.array:
        """Attend to what another layer has written → [B, W, H·D]. `queries` are [B, W, H·D]."""
        B, W, _ = queries.shape
        by_head = self.norm(queries.reshape(B, W, layer.heads, -1), layer.module.q_norm).transpose(0, 2, 1, 3)
        offset = memory.offset if memory.start is None else memory.start
        heads = ArrangedHeads(layer.module.rope(by_head, offset=offset), *memory.fetch())
        return self.attend_heads(layer, heads, queries, memory, run)

    def attend(
        self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV, run: Pass
    ) -> mx.array:
        """Write keys and values [B, W, Hkv·D] into `memory` and attend to it → [B, W, H·D], or of the last token of
        each row [B, 1, H·D]."""
        heads = self.write(layer, both, keys, values, memory)
        return self.attend_heads(layer, heads, both, memory, run)

    def write(self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV) -> ArrangedHeads:
        """Write keys and values into `memory`. Returns the queries by head, and the keys and values in reach."""
        made = self.arrange(layer, both, keys, values, memory)
        return ArrangedHeads(made.queries, *memory.update_and_fetch(made.keys, made.values))

    def arrange(
        self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV
    ) -> ArrangedHeads:
        """Return queries, keys and values by head [B, H, W, D], normed and rotated as far as the layer does that."""
        B, W, _ = both.shape
        queries = both.reshape(B, W, layer.heads, -1)
        if layer.gated:
            queries = queries[..., : layer.head_sizes[0]]
        keys, values = (a.reshape(B, W, layer.kv_heads, -1) for a in (keys, values))
        if layer.norms is not None:
            queries, keys = (self.norm(a, norm) for a, norm in zip((queries, keys), layer.norms, strict=True))
        queries, keys, values = (a.transpose(0, 2, 1, 3) for a in (queries, keys, values))
        offset = memory.offset if memory.start is None else memory.start
        if layer.rotates:
            rope = layer.module.rope
            turn = partial(rope, offset=offset)
            if memory.positions is not None:
                turn = partial(rotate_at, rope, memory.positions)
            queries, keys = turn(queries), turn(keys)
        if layer.query_scale is not None:
            period, beta = layer.query_scale
            positions = offset[:, None] + mx.arange(W)  # [B, W]
            scale = 1 + beta * mx.log(1 + mx.floor(positions / float(period)))
            queries = queries * scale[:, None, :, None].astype(queries.dtype)
        if layer.value_scale is not None:
            values = values * layer.value_scale
        return ArrangedHeads(queries, keys, values)

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        """Return the attention [B, W, H·D] of queries to the keys and values in reach, gated where the layer is."""
        return self.attend_seen(layer, heads, both, run.mask(layer.window), run)

    def attend_seen(
        self, layer: Attention, heads: ArrangedHeads, both: mx.array, seen: mx.array | Literal["causal"], run: Pass
    ) -> mx.array:
        """Return the attention [B, W, H·D] of queries to what is `seen` [B, 1, W, reach] of the keys and values;
        `causal`: each query sees one more, and the last all."""
        scale = layer.module.scale
        queries, both = at_last(heads.queries, run.last, 2), at_last(both, run.last)
        if not isinstance(seen, str):
            seen = at_last(seen, run.last, 2)
        out = mx.fast.scaled_dot_product_attention(
            queries, heads.keys, heads.values, scale=scale, mask=seen, sinks=layer.sinks
        )
        B, H, W, D = out.shape
        out = out.transpose(0, 2, 1, 3).reshape(B, W, -1)
        if not layer.gated:
            return out
        return out * mx.sigmoid(both.reshape(B, W, H, 2 * D)[..., D:].reshape(B, W, -1))

    def selected_attention(
        self, layer: SelectedAttention, x: mx.array, memory: KV, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Attend to the tokens that the index selects. All are read; kernels may leave out what is not seen."""
        inner, part = layer.attention, layer.module
        projections = part.q_proj, part.k_proj, part.v_proj, layer.index.index_qk_proj
        both, keys, values, indexed = self.products(x, projections, run.adapters)
        heads = self.write(inner, both, keys, values, memory)
        seen = self.select(layer, indexed, memory, run)
        out = self.attend_seen(inner, heads, both, seen, run)
        return self.add(residual, self.product(out, part.o_proj, run.adapters), run)

    def select(self, layer: SelectedAttention, indexed: mx.array, memory: KV, run: Pass) -> mx.array:
        """Write queries and keys of the index [B, W, (H + 1)·D] into `memory`, and return what the window attends to,
        [B, 1, W, reach]."""
        B, W, _ = indexed.shape
        rows = memory.offset[:, None] + mx.arange(W)  # [B, W]
        at = rows if memory.start is None else memory.start[:, None] + mx.arange(W)
        ids = mx.broadcast_to(at[..., None], (B, W, 3))
        if memory.positions is not None:
            ids = memory.positions.ids.swapaxes(1, 2)
        queries, keys = mx.split(indexed, [layer.heads * layer.size], axis=-1)
        held, starts = memory.update_index([keys[:, None], ids[:, None].astype(mx.int32)])
        if memory.reach <= layer.budget:  # every block is among the best
            return run.mask(None)
        queries = self.norm(queries.reshape(B, W, layer.heads, -1), layer.index.q_layernorm)
        means = block_means(held[:, 0], layer.block).astype(keys.dtype)  # [B, N, D]
        means = self.norm(means, layer.index.k_layernorm)
        starts = starts[:, 0, :: layer.block][:, : means.shape[1]]
        turned = rotate_by(means, starts, layer.base, layer.axes)
        scores = relu_scores(rotate_by(queries, ids[:, :, None], layer.base, layer.axes), turned)
        return select_tokens(scores, rows, layer.block, layer.budget, memory.reach)[:, None]

    def latent_attention(
        self, layer: LatentAttention, x: mx.array, memory: KV, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Attend to latents [B, 1, S, R] and rotated keys [B, 1, S, D].

        mlx-lm expands the latents to keys and values where a pass has more than one token, and multiplies the queries
        by the expansion where it has one. These round differently. A window must give the bits of plain decoding, so
        queries are always multiplied.
        """
        part, (B, W, _), adapters = layer.module, x.shape, run.adapters
        first = part.q_proj if part.q_lora_rank is None else part.q_a_proj
        queries, compressed = self.products(x, (first, part.kv_a_proj_with_mqa), adapters)
        if part.q_lora_rank is not None:
            queries = self.norm(queries, part.q_a_layernorm)
            if layer.indexer is not None:
                run.selected[:] = [self.select_latents(layer, x, queries, memory, run)]
            queries = self.product(queries, part.q_b_proj, adapters)
        queries = queries.reshape(B, W, part.num_heads, part.q_head_dim).transpose(0, 2, 1, 3)
        if layer.query_scale != 1:
            queries = queries * layer.query_scale
        queries, rotated = mx.split(queries, [part.qk_nope_head_dim], axis=-1)
        latents, keys = mx.split(compressed[:, None], [part.kv_lora_rank], axis=-1)  # [B, 1, W, …]
        if part.qk_rope_head_dim:
            rotated, keys = part.rope(rotated, memory.offset), part.rope(keys, memory.offset)
        latents = self.norm(latents, part.kv_a_layernorm)
        latents = latents if layer.latent_scale == 1 else latents * layer.latent_scale
        latents, keys = memory.update_and_fetch(latents, keys)
        queries = at_last(queries, run.last, 2)
        seen = at_last(run.mask(None), run.last, 2) if layer.budget is None else run.selected[0]
        if part.qk_rope_head_dim:
            scores = (at_last(rotated, run.last, 2) * part.scale) @ keys.swapaxes(-1, -2)  # [B, H, W, S]
            seen = mx.where(seen, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        queries = part.embed_q(queries).astype(queries.dtype)  # [B, H, W, R]
        out = mx.fast.scaled_dot_product_attention(queries, latents, latents, scale=part.scale, mask=seen)
        out = part.unembed_out(out).astype(out.dtype).transpose(0, 2, 1, 3)
        if (gates := layer.head_gates) is not None:
            out = out * mx.sigmoid(self.product(at_last(x, run.last), gates, adapters))[..., None]
        return self.add(residual, self.product(out.reshape(B, out.shape[1], -1), layer.output, adapters), run)

    def select_latents(
        self, layer: LatentAttention, x: mx.array, queries: mx.array, memory: KV, run: Pass
    ) -> mx.array:
        """Write what tokens are selected by into `memory`, and return which of them rows attend to [B, 1, W, S].

        `queries` [B, W, R] are those of the layer, as its last projection is given them.
        """
        part, adapters = layer.indexer, run.adapters
        assert part is not None
        assert layer.budget is not None
        first = (part.wk,) if layer.pool is None else (part.wk, part.index_kpool_compress_gate)
        keys, *gates = (a[:, None] for a in self.products(x, first, adapters))
        keys = self.norm(keys, part.k_norm)
        keys = part.rope(keys, memory.offset) if layer.head_sizes[1] else keys
        keys, *gates = (a[:, 0] for a in memory.update_index([keys, *gates]))  # [B, S, D]
        seen = at_last(run.mask(None), run.last, 2)
        if keys.shape[1] <= layer.budget:
            return seen
        made = self.product(queries, part.wq_b, adapters).reshape(*x.shape[:2], part.n_heads, -1)
        if layer.head_sizes[1]:
            made = part.rope(made.swapaxes(1, 2), memory.offset).swapaxes(1, 2)
        made, x, matrix = at_last(made, run.last), at_last(x, run.last), part.weights_proj  # [B, W, H, D]
        if matrix.weight.dtype == mx.float32:  # as released
            weights = x.astype(mx.float32) @ matrix.weight.T
        else:
            weights = self.product(x, matrix, adapters)
        weights = weights * (part.n_heads * part.head_dim) ** -0.5
        if layer.pool is None:
            return select_best(relu_scores(made, keys, weights)[:, None], seen, layer.budget)
        pools = pooled_keys(keys, gates[0], part.index_kpool_compress_ape, layer.pool)
        rows = at_last(memory.offset[:, None] + mx.arange(queries.shape[1]), run.last)
        scores = relu_scores(made, pools, weights)
        return select_tokens(scores, rows, layer.pool, layer.budget, memory.reach)[:, None]
