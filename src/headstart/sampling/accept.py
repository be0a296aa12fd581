"""Acceptance rules: how many drafts to accept, and the token after them. Pure functions; noise is passed in.

Every rule but the optimistic one preserves the target's distribution for any drafter: a good drafter is faster and a
bad one slower, and the text is the same (coupled) or has the same distribution (ratio).
"""

from typing import NamedTuple

import mlx.core as mx


class AcceptResult(NamedTuple):
    accepted: mx.array  # [B] int32, n accepted drafts
    tokens: mx.array  # [B, k+1] int32: the n accepted drafts, the token after them, then undefined

    @property
    def next(self) -> mx.array:
        """Return the token at index n, [B]."""
        return mx.take_along_axis(self.tokens, self.accepted[:, None], axis=1).squeeze(1)


def accept_coupled(samples: mx.array, drafts: mx.array, allowed: mx.array) -> AcceptResult:
    """Gumbel coupling: accept drafts [B, k] while they equal the target's samples [B, k+1], at most `allowed` [B].

    The target's sample at a position is argmax(log p + noise), with noise that depends on the seed and the position
    only. The emitted tokens are those samples, whatever was drafted. Greedy decoding is the same without noise.
    """
    k = drafts.shape[1]
    agree = (drafts == samples[:, :k]) & (mx.arange(k) < allowed[:, None])
    return AcceptResult(mx.cumprod(agree.astype(mx.int32), axis=1).sum(axis=1), samples)


class BlockAcceptance(NamedTuple):
    probability: mx.array  # [B, k], at i: that i+1 drafts are accepted
    weight: mx.array  # [B, k+1], at i: likelihood ratio of target to drafter over the first i drafts, clipped to 1


def block_acceptance(
    p: mx.array, q: mx.array, p_drafts: mx.array, q_drafts: mx.array, allowed: mx.array
) -> BlockAcceptance:
    """Block verification (Sun et al. 2024, arXiv:2403.10444), a form of speculative sampling.

    It verifies the drafts together and accepts at least as many as speculative sampling token by token (Leviathan et
    al. 2023) does.

    Args:
        p: [B, k+1, C], the target's probabilities at each position.
        q: [B, k, C], the drafter's probabilities of the same tokens.
        p_drafts: [B, k], the target's probabilities of the drafts.
        q_drafts: [B, k], the drafter's probabilities of the drafts.
        allowed: [B], most drafts to accept.
    """
    B, k = p_drafts.shape
    one = mx.ones((B,), p.dtype)
    weights, probabilities = [one], []
    for i in range(k):
        weight = mx.minimum(weights[-1] * p_drafts[:, i] / q_drafts[:, i], one)
        weights.append(weight)
        if i + 1 == k:
            probabilities.append(weight)
            continue
        # The mass of the target that the drafter cannot produce after i+1 drafts, relative to what is left.
        excess = mx.maximum(weight[:, None] * p[:, i + 1] - q[:, i + 1], 0).sum(axis=-1)
        total = excess + (1 - weight)
        share = mx.where(total == 0, one, excess / total)  # NaN stays: it accepts nothing
        probabilities.append(mx.where(allowed == i + 1, weight, share))
    within_limit = mx.arange(1, k + 1) <= allowed[:, None]
    return BlockAcceptance(mx.where(within_limit, mx.stack(probabilities, axis=1), 0), mx.stack(weights, axis=1))


def longest_accepted(probability: mx.array, uniforms: mx.array) -> mx.array:
    """Return how many drafts are accepted, [B]: the longest prefix whose own trial succeeds.

    In block verification a longer prefix that succeeds outweighs a shorter one that failed.
    """
    k = probability.shape[1]
    return mx.where(uniforms < probability, mx.arange(1, k + 1), 0).max(axis=1)


def residual_distribution(
    p: mx.array, q: mx.array, weight: mx.array, accepted: mx.array, allowed: mx.array
) -> mx.array:
    """Return the unnormalised distribution [B, C] of the token after the accepted drafts.

    After a rejection it is max(weight·p − q, 0): the mass of the target that the drafter cannot produce. Nothing is
    added for stability, or tokens that truncation removed would return. If that mass is 0, or all allowed drafts were
    accepted, it is the target's p (the bonus token).
    """
    at = accepted[:, None, None]
    p = mx.take_along_axis(p, at, axis=1).squeeze(1)  # [B, C]
    q = mx.take_along_axis(q, mx.minimum(at, q.shape[1] - 1), axis=1).squeeze(1)
    residual = mx.maximum(mx.take_along_axis(weight, accepted[:, None], axis=1) * p - q, 0)
    rejected = (accepted < allowed) & (residual.sum(axis=-1) > 0)
    return mx.where(rejected[:, None], residual, p)


def accept_first(drafts: mx.array, accepted: mx.array, next_token: mx.array) -> AcceptResult:
    """Return the result that accepts the first `accepted` [B] drafts and continues with `next_token` [B]."""
    k = drafts.shape[1]
    padded = mx.concatenate([drafts, next_token[:, None]], axis=1)
    return AcceptResult(accepted, mx.where(mx.arange(k + 1) < accepted[:, None], padded, next_token[:, None]))
