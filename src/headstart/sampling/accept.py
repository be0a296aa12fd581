"""Which drafts stand, and what comes after them. Pure functions; the randomness is handed in.

Every rule here but `optimistic` leaves the target's distribution as it is, whatever was drafted: a good drafter is
faster, a bad one slower, and nobody can tell from the text.
"""

from typing import NamedTuple

import mlx.core as mx


class AcceptResult(NamedTuple):
    accepted: mx.array  # [B] int32, n
    tokens: mx.array  # [B, k+1] int32: n accepted drafts, the token after them, then nothing of meaning

    @property
    def next(self) -> mx.array:
        """[B], the token at index n."""
        return mx.take_along_axis(self.tokens, self.accepted[:, None], axis=1).squeeze(1)


def coupled(choices: mx.array, drafts: mx.array, allowed: mx.array) -> AcceptResult:
    """Accept drafts [B, k] while they are the target's own choices [B, k+1], at most `allowed` [B] of them.

    The choice at a position is argmax(log p + noise) with the noise of that position, the same whoever looks. So
    the emitted tokens are the target's, and do not depend on the drafts at all. Greedy is this without noise.
    """
    k = drafts.shape[1]
    agree = (drafts == choices[:, :k]) & (mx.arange(k) < allowed[:, None])
    return AcceptResult(mx.cumprod(agree.astype(mx.int32), axis=1).sum(axis=1), choices)


class Block(NamedTuple):
    """A block of drafts: the `chance[:, i]` that i+1 of them stand, and what i accepted ones carry on."""

    chance: mx.array  # [B, k]
    carry: mx.array  # [B, k+1]


def block(p: mx.array, q: mx.array, p_drafts: mx.array, q_drafts: mx.array, allowed: mx.array) -> Block:
    """Block verification (Sun et al. 2024, arXiv:2403.10444): judge the drafts together, not one by one.

    p [B, k+1, C] and q [B, k, C] are the target's and the drafter's probabilities over the same tokens at each
    position, p_drafts and q_drafts [B, k] those of the drafts themselves. `carry` is how likely the target is to
    have said the drafts so far, relative to the drafter and at most 1. i drafts stand with the share of what could
    still be said after them: never less than rejecting token by token would accept.
    """
    B, k = p_drafts.shape
    one = mx.ones((B,), p.dtype)
    carry, chance = [one], []
    for i in range(k):
        carry.append(mx.minimum(carry[-1] * p_drafts[:, i] / q_drafts[:, i], one))
        here, last = carry[-1], allowed == i + 1
        if i + 1 < k:
            excess = mx.maximum(here[:, None] * p[:, i + 1] - q[:, i + 1], 0).sum(axis=-1)
            total = excess + (1 - here)
            share = mx.where(total == 0, one, excess / total)  # NaN stays: it accepts nothing
            chance.append(mx.where(last, here, share))
        else:
            chance.append(here)
    stands = mx.arange(1, k + 1) <= allowed[:, None]
    return Block(mx.where(stands, mx.stack(chance, axis=1), 0), mx.stack(carry, axis=1))


def residual(p: mx.array, q: mx.array, carry: mx.array, accepted: mx.array, allowed: mx.array) -> mx.array:
    """[B, C], up to a factor: what the token after the accepted drafts is drawn from.

    After a rejection, what the drafter could not already have said: max(carry·p − q, 0), with no floor under it, or
    tokens that truncation removed would leak back. Where that has no mass, and after a full accept, the target.
    """
    row = accepted[:, None, None]
    p = mx.take_along_axis(p, row, axis=1).squeeze(1)  # [B, C]
    q = mx.take_along_axis(q, mx.minimum(row, q.shape[1] - 1), axis=1).squeeze(1)
    left = mx.maximum(mx.take_along_axis(carry, accepted[:, None], axis=1) * p - q, 0)
    rejected = (accepted < allowed) & (left.sum(axis=-1) > 0)
    return mx.where(rejected[:, None], left, p)


def longest(chance: mx.array, uniform: mx.array) -> mx.array:
    """[B]: the most drafts that stand, when each prefix is tried with its own number. A later success outweighs an
    earlier failure: that is what judging them as a block means."""
    k = chance.shape[1]
    return mx.where(uniform < chance, mx.arange(1, k + 1), 0).max(axis=1)


def placed(drafts: mx.array, accepted: mx.array, following: mx.array) -> AcceptResult:
    """The verdict that `accepted` [B] drafts stand and `following` [B] comes after them."""
    k = drafts.shape[1]
    padded = mx.concatenate([drafts, following[:, None]], axis=1)
    return AcceptResult(accepted, mx.where(mx.arange(k + 1) < accepted[:, None], padded, following[:, None]))
