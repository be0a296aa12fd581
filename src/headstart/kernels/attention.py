"""Attention layers over keys and values of rows of different lengths, by MLX's own operations."""

from functools import partial

import mlx.core as mx

from ..state import KV
from ..state.kv import TokenPositions
from .experts import FeedForwards
from .layers import Attention, LatentAttention, Pass, Residual, at_last
from .types import ArrangedHeads


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


class Attentions(FeedForwards):
    """Attention layers.

    A layer is given x [B, W, H] and returns the residual stream with its output, and the norm of that. `both` are the
    queries [B, W, H·D], or, by head, queries and gates [B, W, H·2·D] where the layer is gated.
    """

    def attention(
        self, layer: Attention, x: mx.array, memory: KV, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array]:
        """Run grouped-query attention: write the window into `memory` and attend to it."""
        part = layer.module
        both, keys, values = self.products(x, (part.q_proj, part.k_proj, part.v_proj), run.adapters)
        out = self.attend(layer, both, keys, values, memory, run)  # [B, W, H·D]
        if (projection := layer.head_gates) is not None:
            gates = mx.sigmoid(self.product(at_last(x, run.last), projection, run.adapters))  # [B, W, H]
            by_head = out.reshape(*gates.shape, -1)
            out = (by_head * gates[..., None]).reshape(out.shape)
        return self.add(residual, self.product(out, part.o_proj, run.adapters), run)

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
        seen, scale = run.mask(layer.window), layer.module.scale
        queries, both, seen = at_last(heads.queries, run.last, 2), at_last(both, run.last), at_last(seen, run.last, 2)
        out = mx.fast.scaled_dot_product_attention(
            queries, heads.keys, heads.values, scale=scale, mask=seen, sinks=layer.sinks
        )
        B, H, W, D = out.shape
        out = out.transpose(0, 2, 1, 3).reshape(B, W, -1)
        if not layer.gated:
            return out
        return out * mx.sigmoid(both.reshape(B, W, H, 2 * D)[..., D:].reshape(B, W, -1))

    def latent_attention(
        self, layer: LatentAttention, x: mx.array, memory: KV, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array]:
        """Attend to latents [B, 1, S, R] and rotated keys [B, 1, S, D].

        mlx-lm expands the latents to keys and values where a pass has more than one token, and multiplies the queries
        by the expansion where it has one. These round differently. A window must give the bits of plain decoding, so
        queries are always multiplied.
        """
        part, (B, W, _), adapters = layer.module, x.shape, run.adapters
        if part.q_lora_rank is None:
            queries, compressed = self.products(x, (part.q_proj, part.kv_a_proj_with_mqa), adapters)
        else:
            queries, compressed = self.products(x, (part.q_a_proj, part.kv_a_proj_with_mqa), adapters)
            queries = self.product(self.norm(queries, part.q_a_layernorm), part.q_b_proj, adapters)
        queries = queries.reshape(B, W, part.num_heads, part.q_head_dim).transpose(0, 2, 1, 3)
        if layer.query_scale != 1:
            queries = queries * layer.query_scale
        queries, rotated = mx.split(queries, [part.qk_nope_head_dim], axis=-1)
        latents, keys = mx.split(compressed[:, None], [part.kv_lora_rank], axis=-1)  # [B, 1, W, …]
        rotated, keys = part.rope(rotated, memory.offset), part.rope(keys, memory.offset)
        latents = self.norm(latents, part.kv_a_layernorm)
        latents = latents if layer.latent_scale == 1 else latents * layer.latent_scale
        latents, keys = memory.update_and_fetch(latents, keys)
        queries, rotated, seen = (at_last(a, run.last, 2) for a in (queries, rotated, run.mask(None)))
        scores = (rotated * part.scale) @ keys.swapaxes(-1, -2)  # [B, H, W, S]
        scores = mx.where(seen, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        queries = part.embed_q(queries).astype(queries.dtype)  # [B, H, W, R]
        out = mx.fast.scaled_dot_product_attention(queries, latents, latents, scale=part.scale, mask=scores)
        out = part.unembed_out(out).astype(out.dtype).transpose(0, 2, 1, 3)
        return self.add(residual, self.product(out.reshape(B, out.shape[1], -1), part.o_proj, adapters), run)
