"""From logits to the distribution that each sequence samples from.

The stages and their order are mlx-lm's. A stage that no sequence of the batch uses is not computed; a sequence that
does not use a stage that others do comes out of it unchanged.
"""

from typing import NamedTuple

import mlx.core as mx

from .controls import Controls
from .noise import Keys, gumbel


class Distribution(NamedTuple):
    """Normalised log-probabilities of the tokens `ids`, most probable first, or of all tokens in order of id."""

    ids: mx.array | None  # [B, W, C] int32
    logp: mx.array  # [B, W, C] float32
    # Unnormalised `logp`, -inf where a token cannot be drawn. The last bit of a sum over tokens depends on their
    # number and order, and so on the other sequences of the batch: what a seeded sequence draws must not.
    scores: mx.array | None = None  # [B, W, C] float32

    def dense(self, vocabulary: int) -> mx.array:
        """Return the probabilities [B, W, V] of all tokens."""
        p = mx.exp(self.logp)
        if self.ids is None:
            return p
        return mx.put_along_axis(mx.zeros((*p.shape[:-1], vocabulary), p.dtype), self.ids, p, axis=-1)

    def probability(self, tokens: mx.array) -> mx.array:
        """Return the probabilities of the tokens [B, W]."""
        if self.ids is None:
            return mx.exp(mx.take_along_axis(self.logp, tokens[..., None], axis=-1)).squeeze(-1)
        return mx.where(self.ids == tokens[..., None], mx.exp(self.logp), 0).sum(axis=-1)

    def aligned(self, probabilities: mx.array) -> mx.array:
        """Return those of the probabilities [B, W, V] that belong to the tokens of this distribution, [B, W, C]."""
        return probabilities if self.ids is None else mx.take_along_axis(probabilities, self.ids, axis=-1)

    def sample(self, keys: Keys) -> mx.array:
        """Draw a token for each key [B, W]."""
        return gumbel_argmax(self.logp if self.scores is None else self.scores, self.ids, keys)


def gumbel_argmax(logp: mx.array, ids: mx.array | None, keys: Keys) -> mx.array:
    """Draw tokens […] from log-probabilities […, C], normalised or not: argmax(logp + Gumbel noise).

    The noise belongs to the token id and not to its place in the list. So two distributions sampled with the same
    keys tend to give the same token: that is the coupling of drafts and target.
    """
    named = mx.arange(logp.shape[-1]) if ids is None else ids
    values = logp + gumbel(keys, named)
    if ids is None:
        return mx.argmax(values, axis=-1).astype(mx.int32)
    # Among equals take the lowest id, as argmax does. If values are NaN none equals the best: still return an id.
    best = mx.where(values == values.max(axis=-1, keepdims=True), ids, ids.max(axis=-1, keepdims=True))
    return best.min(axis=-1)


def process_logits(
    logits: mx.array,
    controls: Controls,
    seen: mx.array,
    remaining: mx.array,
    counts: mx.array | None = None,
    permitted: mx.array | None = None,
) -> mx.array:
    """Apply biases, penalties, forbidden stop ids, grammars and top-n-sigma to logits [B, W, V], in float32.

    Args:
        seen: [B, W, L], the tokens before each position, the newest last, -1 where there is none.
        remaining: [B, W], how many tokens the sequence may still generate there.
        counts: [B, W, V], how often each token was generated before each position, if a penalty needs it.
        permitted: [B, W, V], the tokens that grammars permit at each position.
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
        # Tokens out of context are replaced by the newest one, which is written twice with the same value.
        ids = mx.maximum(mx.where(valid, seen, seen[..., -1:]), 0)
        was = mx.take_along_axis(logits, ids, axis=-1)
        if penalty.kind == "repetition":
            now = mx.where(was < 0, was * penalty.strength, was / penalty.strength)
        else:
            now = was - penalty.strength
        logits = mx.put_along_axis(logits, ids, now, axis=-1)
    if controls.count_penalty is not None and counts is not None:
        logits = logits - controls.count_penalty.presence * (counts > 0) - controls.count_penalty.frequency * counts
    if controls.min_tokens is not None:
        stop_ids, free_at = controls.min_tokens
        ids = mx.broadcast_to(stop_ids, (*logits.shape[:2], stop_ids.shape[-1]))
        was = mx.take_along_axis(logits, ids, axis=-1)
        too_early = (remaining > free_at)[..., None]  # [B, W, 1]
        logits = mx.put_along_axis(logits, ids, mx.where(too_early, -mx.inf, was), axis=-1)
    if permitted is not None:
        logits = mx.where(permitted, logits, -mx.inf)
    return logits if controls.top_n_sigma is None else _near_best(logits, controls.top_n_sigma)


def _near_best(logits: mx.array, n: mx.array) -> mx.array:
    """Remove tokens whose logit is more than n [B, 1, 1] standard deviations below the best one's; none where n is 0.

    It is done to the logits, before kernels draw from them: none of them knows of it. The sums are over the whole
    vocabulary in order of id, so they are the same for every batch.
    """
    below = logits - logits.max(axis=-1, keepdims=True)  # [B, W, V]
    possible = below > -mx.inf
    count = possible.astype(mx.int32).sum(axis=-1, keepdims=True)
    mean = mx.where(possible, below, 0).sum(axis=-1, keepdims=True) / count
    variance = mx.where(possible, mx.square(below - mean), 0).sum(axis=-1, keepdims=True) / count
    return mx.where((n == 0) | (below >= -n * mx.sqrt(variance)), logits, -mx.inf)


def sampling_distribution(logits: mx.array, controls: Controls, xtc_uniforms: mx.array | None) -> Distribution:
    """Truncate processed logits [B, W, V] (top-p, min-p, XTC, top-k) and apply the temperature.

    Args:
        xtc_uniforms: [B, W] in (0, 1), decide whether XTC applies at a position, if a sequence uses it.
    """
    V = logits.shape[-1]
    best = mx.argmax(logits, axis=-1, keepdims=True)  # [B, W, 1]
    if controls.support == 1:  # every sequence takes its best token: compute no noise over the vocabulary
        return Distribution(best.astype(mx.int32), mx.zeros(best.shape), mx.zeros(best.shape))
    greedy = controls.temperature == 0
    temperature = mx.where(greedy, 1, controls.temperature)
    if not controls.truncates:
        scores = logits / temperature
        if controls.any_greedy:
            one_hot = mx.where(mx.arange(V) == best, 0, -mx.inf)
            scores = mx.where(greedy, one_hot, scores)
        return Distribution(None, _log_softmax(scores), scores)

    C = min(controls.support or V, V)
    ids = best_ids(logits, C)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    logits = mx.take_along_axis(logits, ids, axis=-1)
    logp = logits - total  # [B, W, C]
    p = mx.exp(logp)
    rank = mx.arange(C)

    # Up to XTC the kept tokens are the first ranks, and rank 0 is always kept: min_p and XTC rely on it. A filter
    # that may drop the best token comes after top_k.
    keep = ((mx.cumsum(p, axis=-1) - p) < controls.top_p) | (rank == 0)
    keep = keep & ((logp >= logp[..., :1] + mx.log(controls.min_p)) | (rank < controls.min_keep))
    if controls.xtc is not None and xtc_uniforms is not None:
        # Exclude top choices: of the tokens above the threshold, all but the least probable.
        p = mx.where(keep, p, 0)
        above = keep & (p / p.sum(axis=-1, keepdims=True) > controls.xtc.threshold)
        exclude = above & (rank < above.sum(axis=-1, keepdims=True) - 1)
        exclude = exclude & (xtc_uniforms[..., None] <= controls.xtc.probability)
        special = (ids[..., None] == controls.xtc.special).any(axis=-1)
        keep = keep & (~exclude | special)
    keep = keep & (mx.cumsum(keep.astype(mx.int32), axis=-1) <= controls.top_k)
    scores = mx.where(keep, logits / temperature, -mx.inf)
    if controls.any_greedy:  # ties: take the lowest id, as argmax does
        ids = mx.where(greedy & (rank == 0), best, ids).astype(mx.int32)
        scores = mx.where(greedy, mx.where(rank == 0, 0, -mx.inf), scores)
    return Distribution(ids, _log_softmax(scores), scores)


class Logprobs(NamedTuple):
    """Log-probabilities under the model itself, before temperature and truncation, in float32."""

    chosen: mx.array  # [B, W], of the generated tokens
    top_ids: mx.array  # [B, W, N], the most probable tokens, best first
    top: mx.array  # [B, W, N]


def logprobs(logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
    """Return the log-probabilities of `tokens` [B, W] and of the `top` best tokens under logits [B, W, V]."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(logits, tokens[..., None], axis=-1) - total).squeeze(-1)
    top = min(top, logits.shape[-1])
    if top == 0:
        empty = mx.zeros((*tokens.shape, 0))
        return Logprobs(chosen, empty.astype(mx.int32), empty)
    ids = best_ids(logits, top)
    return Logprobs(chosen, ids, mx.take_along_axis(logits, ids, axis=-1) - total)


def best_ids(logits: mx.array, count: int) -> mx.array:
    """Return the ids [..., count] of the best tokens, best first, and among equals the lower id first.

    The order of equals must not depend on `count`, which follows from other sequences of the batch.
    """
    if count == logits.shape[-1]:
        return mx.argsort(-logits, axis=-1).astype(mx.int32)
    ids = mx.sort(mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count], axis=-1)
    order = mx.argsort(-mx.take_along_axis(logits, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1).astype(mx.int32)


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _add(logits: mx.array, ids: mx.array, values: mx.array) -> mx.array:
    """Compute `logits[b, w, ids[b, w, l]] += values[b, w, l]`; repeated ids add up."""
    B, W, _ = logits.shape
    rows, columns = mx.arange(B)[:, None, None], mx.arange(W)[None, :, None]
    return logits.at[rows, columns, ids].add(mx.broadcast_to(values, (B, W, ids.shape[-1])))
