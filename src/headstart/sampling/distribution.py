"""From logits to the distribution that a request asked for, for rows that ask for different things.

The stages and their order are mlx-lm's. A stage that no row of the batch needs is not computed; a row that does
not need one that others do comes out of it as it went in.
"""

from typing import NamedTuple

import mlx.core as mx

from .controls import Controls
from .noise import Keys, gumbel


class Distribution(NamedTuple):
    """Normalised log-probabilities of the tokens `ids`, most probable first, or of all tokens in their order."""

    ids: mx.array | None  # [B, W, C] int32
    logp: mx.array  # [B, W, C] float32
    # The same up to a constant, -inf where a token cannot be drawn. A sum over tokens depends in its last bit on
    # how many there are and in which order, and that on the other rows: what a seeded row draws must not.
    scores: mx.array | None = None  # [B, W, C] float32

    def dense(self, vocabulary: int) -> mx.array:
        """Probabilities of all tokens, [B, W, V]."""
        p = mx.exp(self.logp)
        if self.ids is None:
            return p
        return mx.put_along_axis(mx.zeros((*p.shape[:-1], vocabulary), p.dtype), self.ids, p, axis=-1)

    def chance(self, tokens: mx.array) -> mx.array:
        """Probabilities of the tokens [B, W]."""
        if self.ids is None:
            return mx.exp(mx.take_along_axis(self.logp, tokens[..., None], axis=-1)).squeeze(-1)
        return mx.where(self.ids == tokens[..., None], mx.exp(self.logp), 0).sum(axis=-1)

    def aligned(self, probabilities: mx.array) -> mx.array:
        """Somebody else's probabilities [B, W, V], of the tokens that are listed here."""
        return probabilities if self.ids is None else mx.take_along_axis(probabilities, self.ids, axis=-1)

    def draw(self, keys: Keys) -> mx.array:
        """A token for each key [B, W]."""
        return draw(self.logp if self.scores is None else self.scores, self.ids, keys)


def draw(logp: mx.array, ids: mx.array | None, keys: Keys) -> mx.array:
    """[…] tokens from log-probabilities […, C], which need not be normalised: Gumbel's argmax."""
    named = mx.arange(logp.shape[-1]) if ids is None else ids
    values = logp + gumbel((keys[0][..., None], keys[1][..., None]), named)
    if ids is None:
        return mx.argmax(values, axis=-1).astype(mx.int32)
    # Of equals the lowest id, as argmax has it. Where values are NaN none equals the best: still one of the ids.
    best = mx.where(values == values.max(axis=-1, keepdims=True), ids, ids.max(axis=-1, keepdims=True))
    return best.min(axis=-1)


def adjust(
    logits: mx.array, controls: Controls, seen: mx.array, remaining: mx.array, counts: mx.array | None = None
) -> mx.array:
    """Apply bias, penalties and forbidden stops to logits [B, W, V], in float32.

    Args:
        seen: [B, W, L], the tokens before each position, the newest last, -1 where there is none.
        remaining: [B, W], how many tokens the sequence may still generate there.
        counts: [B, W, V], how often each token was generated before each position, if a penalty needs it.
    """
    logits = logits.astype(mx.float32)
    if controls.bias is not None:
        logits = _add(logits, controls.bias.ids, controls.bias.values)
    for penalty in controls.penalties:
        age = mx.arange(seen.shape[-1] - 1, -1, -1)
        valid = (seen >= 0) & (age < penalty.context_size)
        if penalty.kind == "frequency":
            logits = _add(logits, mx.maximum(seen, 0), mx.where(valid, -penalty.strength, 0.0))
            continue
        # Tokens out of context give their place to the newest one, which is written twice with the same value.
        ids = mx.maximum(mx.where(valid, seen, seen[..., -1:]), 0)
        was = mx.take_along_axis(logits, ids, axis=-1)
        if penalty.kind == "repetition":
            now = mx.where(was < 0, was * penalty.strength, was / penalty.strength)
        else:
            now = was - penalty.strength
        logits = mx.put_along_axis(logits, ids, now, axis=-1)
    if controls.count_penalty is not None and counts is not None:
        logits = logits - controls.count_penalty.presence * (counts > 0) - controls.count_penalty.frequency * counts
    if controls.early is not None:
        too_early = (remaining > controls.early.free_at)[..., None]  # [B, W, 1]
        ids = mx.broadcast_to(controls.early.stop_ids, (*logits.shape[:2], controls.early.stop_ids.shape[-1]))
        was = mx.take_along_axis(logits, ids, axis=-1)
        logits = mx.put_along_axis(logits, ids, mx.where(too_early, -mx.inf, was), axis=-1)
    return logits


def distribution(logits: mx.array, controls: Controls, coins: mx.array | None) -> Distribution:
    """Adjusted logits [B, W, V] → what to draw from. `coins` [B, W] in (0, 1) decide on XTC where a row uses it."""
    best = mx.argmax(logits, axis=-1, keepdims=True)  # [B, W, 1]
    if controls.support == 1:  # everybody takes the best token: no noise over the vocabulary for that
        return Distribution(best.astype(mx.int32), mx.zeros(best.shape), mx.zeros(best.shape))
    greedy, temperature = controls.temperature == 0, mx.where(controls.temperature == 0, 1, controls.temperature)
    if not controls.truncates:
        scores = logits / temperature
        if controls.any_greedy:
            one_hot = mx.where(mx.arange(logits.shape[-1]) == best, 0, -mx.inf)
            scores = mx.where(greedy, one_hot, scores)
        return Distribution(None, _normalised(scores), scores)

    V = logits.shape[-1]
    C = min(controls.support or V, V)
    ids = best_ids(logits, C)
    logits, total = mx.take_along_axis(logits, ids, axis=-1), mx.logsumexp(logits, axis=-1, keepdims=True)
    logp = logits - total  # [B, W, C]
    rank = mx.arange(C)

    p = mx.exp(logp)
    keep = ((mx.cumsum(p, axis=-1) - p) < controls.top_p) | (rank == 0)
    keep = keep & ((logp >= logp[..., :1] + mx.log(controls.min_p)) | (rank < controls.min_keep))
    if controls.xtc is not None and coins is not None:
        # Exclude top choices: of the tokens above the threshold, all but the least probable.
        p = mx.where(keep, p, 0)
        above = keep & (p / p.sum(axis=-1, keepdims=True) > controls.xtc.threshold)
        exclude = above & (rank < above.sum(axis=-1, keepdims=True) - 1)
        exclude = exclude & (coins[..., None] <= controls.xtc.probability)
        special = (ids[..., None] == controls.xtc.special).any(axis=-1)
        keep = keep & (~exclude | special)
    keep = keep & (mx.cumsum(keep.astype(mx.int32), axis=-1) <= controls.top_k)
    scores = mx.where(keep, logits / temperature, -mx.inf)
    if controls.any_greedy:  # ties: the first of equals, as argmax has it
        ids = mx.where(greedy & (rank == 0), best, ids).astype(mx.int32)
        scores = mx.where(greedy, mx.where(rank == 0, 0, -mx.inf), scores)
    return Distribution(ids, _normalised(scores), scores)


def best_ids(logits: mx.array, count: int) -> mx.array:
    """The `count` best tokens [..., count], best first. Among equals the lower id comes first, whatever count other
    rows have led to: a list may be cut between them."""
    if count == logits.shape[-1]:
        return mx.argsort(-logits, axis=-1).astype(mx.int32)
    ids = mx.sort(mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count], axis=-1)
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _add(logits: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    """`logits[b, w, ids[b, w, l]] += values[b, w, l]`, repeated ids adding up."""
    B, W, _ = logits.shape
    rows, columns = mx.arange(B)[:, None, None], mx.arange(W)[None, :, None]
    return logits.at[rows, columns, ids].add(mx.broadcast_to(values, (B, W, ids.shape[-1])))
