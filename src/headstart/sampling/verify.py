"""Draft tokens and verify them: `propose` adds a draft to each sequence, `accept_window` verifies all of them.

A sequence is verified by the rule of its request: Gumbel coupling (`accept_coupled`; greedy is its limit),
speculative sampling with block verification (`_accept_by_ratio`), or the optimistic rule, which accepts every draft
and is not exact.
"""

from typing import NamedTuple

import mlx.core as mx

from .accept import (
    AcceptResult,
    accept_coupled,
    accept_first,
    block_acceptance,
    longest_accepted,
    residual_distribution,
)
from .controls import Controls
from .distribution import Distribution, gumbel_argmax, process_logits, sampling_distribution
from .noise import Keys, Purpose, uniform


class BatchContext(NamedTuple):
    """Where the sequences of a batch are, as far as sampling depends on it."""

    controls: Controls
    position: mx.array  # [B], index of the next token in its sequence
    rounds: mx.array  # [B], steps that the sequence has been through
    recent: mx.array  # [B, L], the last tokens, -1 where there is none; L = 0 without penalties
    remaining: mx.array  # [B], tokens that may still be generated
    counts: mx.array | None = None  # [B, V], how often each token was generated, if a penalty needs it
    noise: dict[Purpose, Keys] | None = None  # [B, W], for positions from `position` on, if it is known already

    def keys(self, purpose: Purpose, first: int, count: int) -> Keys:
        """Return keys [B, count] for the positions `first` after the next token's."""
        if self.noise is None:
            positions = self.position[:, None] + mx.arange(first, first + count)
            return self.controls.noise_keys(self.rounds, positions)[purpose]
        one, other = self.noise[purpose]
        return one[:, first : first + count], other[:, first : first + count]


class Proposal(NamedTuple):
    tokens: mx.array  # [B, k]
    q: list[mx.array]  # together [B, k, V], what each draft was drawn from, if a sequence uses the ratio rule
    valid: mx.array | None = None  # [B], drafts from the left that may be accepted; None: all


def propose(logits: mx.array, proposal: Proposal, context: BatchContext, certain: mx.array | None = None) -> Proposal:
    """Add W drafts to each sequence, sampled from a drafter's logits [B, W, V] as the target would be.

    Tokens with a logit of -inf are never drafted: the ratio rule then draws them after a rejection. With penalties,
    W must be 1: every draft changes what the next is drawn from.

    Args:
        certain: [B, W], drafts that are certain whatever the drafter says, -1 where there is none.
    """
    controls = context.controls
    j = proposal.tokens.shape[1]
    q = None
    if controls.argmax_only:
        token = mx.argmax(logits, axis=-1).astype(mx.int32)
    else:
        distribution = _distribution(logits, context, proposal.tokens, j)
        token = distribution.sample(context.keys(Purpose.DRAFT, j, logits.shape[1]))
        if "ratio" in controls.rules:
            q = distribution.dense(logits.shape[-1])
    if certain is not None:
        token = mx.where(certain >= 0, certain, token)
        if q is not None:
            q = mx.where(certain[..., None] >= 0, _point_mass(token, q.shape[-1]), q)
    tokens = mx.concatenate([proposal.tokens, token], axis=1)
    return Proposal(tokens, proposal.q if q is None else [*proposal.q, q])


def propose_certain(certain: mx.array, controls: Controls, vocabulary: int) -> Proposal:
    """Propose drafts [B, k] that are certain, from the left, and none where they are -1."""
    tokens = mx.maximum(certain, 0)
    q = [_point_mass(tokens, vocabulary)] if "ratio" in controls.rules and certain.shape[1] else []
    return Proposal(tokens, q, (certain >= 0).sum(axis=1))


def _point_mass(tokens: mx.array, vocabulary: int) -> mx.array:
    """Return the distribution [B, W, V] of drafts [B, W] that are certain."""
    return (mx.arange(vocabulary) == tokens[..., None]).astype(mx.float32)


def accept_window(
    logits: mx.array, proposal: Proposal, allowed: mx.array, context: BatchContext, permitted: mx.array | None = None
) -> AcceptResult:
    """Verify the drafts against the target's logits [B, k+1, V], each sequence by its own rule.

    Args:
        allowed: [B], most drafts to accept.
        permitted: [B, k+1, V], the tokens that grammars permit at each position.
    """
    controls, drafts = context.controls, proposal.tokens
    if controls.argmax_only:
        if permitted is not None:
            logits = mx.where(permitted, logits, -mx.inf)
        return accept_coupled(mx.argmax(logits, axis=-1).astype(mx.int32), drafts, allowed)
    target = _distribution(logits, context, drafts, 0, permitted)
    if controls.rules == {"ratio"}:
        return _accept_by_ratio(target, proposal, allowed, context)
    # For coupled sequences NEXT and DRAFT have one key: the drafter used the same noise.
    samples = target.sample(context.keys(Purpose.NEXT, 0, logits.shape[1]))
    result = accept_coupled(samples, drafts, allowed)
    if "optimistic" in controls.rules:
        accepted = allowed if permitted is None else mx.minimum(allowed, _count_permitted(drafts, permitted))
        next_token = mx.take_along_axis(samples, accepted[:, None], axis=1).squeeze(1)
        result = _select(controls.optimistic, accept_first(drafts, accepted, next_token), result)
    if "ratio" in controls.rules:
        result = _select(controls.ratio, _accept_by_ratio(target, proposal, allowed, context), result)
    return result


def _accept_by_ratio(
    target: Distribution, proposal: Proposal, allowed: mx.array, context: BatchContext
) -> AcceptResult:
    """Speculative sampling with block verification: accept, then draw the correction or the bonus token."""
    drafts = proposal.tokens
    k = drafts.shape[1]
    next_keys = context.keys(Purpose.NEXT, 0, k + 1)
    if k == 0:
        return accept_first(drafts, mx.zeros_like(allowed), target.sample(next_keys).squeeze(1))

    window = Distribution(None if target.ids is None else target.ids[:, :k], target.logp[:, :k])
    p = mx.exp(target.logp)  # [B, k+1, C]
    q = mx.concatenate(proposal.q, axis=1)  # [B, k, V]
    q_drafts = mx.take_along_axis(q, drafts[..., None], axis=-1).squeeze(-1)
    q = window.aligned(q)  # [B, k, C]
    block = block_acceptance(p, q, window.probability(drafts), q_drafts, allowed)
    uniforms = uniform(context.keys(Purpose.ACCEPT, 0, k))
    accepted = longest_accepted(block.probability, uniforms)

    residual = residual_distribution(p, q, block.weight, accepted, allowed)  # [B, C]
    at = accepted[:, None]
    ids = None
    if target.ids is not None:
        ids = mx.take_along_axis(target.ids, at[..., None], axis=1).squeeze(1)
    first, second = (mx.take_along_axis(word, at, axis=1).squeeze(1) for word in next_keys)
    return accept_first(drafts, accepted, gumbel_argmax(mx.log(residual), ids, (first, second)))


def _distribution(
    logits: mx.array, context: BatchContext, drafts: mx.array, first: int, permitted: mx.array | None = None
) -> Distribution:
    """Return what to sample from at window positions `first`, `first` + 1, …, given the drafts before each."""
    controls = context.controls
    here = mx.arange(first, first + logits.shape[1])  # [W]
    logits = logits.astype(mx.float32)
    if controls.adjusts:
        length = context.recent.shape[1]
        text = mx.concatenate([context.recent, drafts], axis=1)
        seen = text[:, here[:, None] + mx.arange(length)]  # [B, W, L]
        counts = None if context.counts is None else _window_counts(context.counts, drafts, here)
        logits = process_logits(logits, controls, seen, context.remaining[:, None] - here, counts)
    if permitted is not None:
        logits = mx.where(permitted, logits, -mx.inf)
    xtc = None if controls.xtc is None else uniform(context.keys(Purpose.XTC, first, logits.shape[1]))
    return sampling_distribution(logits, controls, xtc)


def _window_counts(counts: mx.array, drafts: mx.array, here: mx.array) -> mx.array:
    """Return [B, W, V]: the counts [B, V] at window positions `here` [W], with the drafts [B, k] before each."""
    B, k = drafts.shape
    W = here.shape[0]
    window = mx.broadcast_to(counts[:, None], (B, W, counts.shape[-1]))
    if k == 0:
        return window
    before = (mx.arange(k) < here[:, None]).astype(counts.dtype)  # [W, k]
    rows, columns = mx.arange(B)[:, None, None], mx.arange(W)[None, :, None]
    return window.at[rows, columns, drafts[:, None]].add(mx.broadcast_to(before, (B, W, k)))


def _count_permitted(drafts: mx.array, permitted: mx.array) -> mx.array:
    """Return how many drafts come before the first one that a grammar forbids, [B]."""
    each = mx.take_along_axis(permitted[:, : drafts.shape[1]], drafts[..., None], axis=-1).squeeze(-1)
    return mx.cumprod(each.astype(mx.int32), axis=1).sum(axis=1)


def _select(condition: mx.array, a: AcceptResult, b: AcceptResult) -> AcceptResult:
    """Return `a` for sequences where `condition` [B] holds, else `b`."""
    tokens = mx.where(condition[:, None], a.tokens, b.tokens)
    return AcceptResult(mx.where(condition, a.accepted, b.accepted), tokens)
