"""Draft tokens and verify them: `propose` adds a draft to each sequence, `accept_window` verifies all of them.

A sequence is verified by the rule of its request: Gumbel coupling (`accept_coupled`; greedy is its limit),
speculative sampling with block verification (`_accept_by_ratio`), or the optimistic rule, which accepts every draft
and is not exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from ..kernels.cuda.greedy import BestTokens
from ..kernels.cuda.sampling import DraftRows, Draws, Sampler, draw_fits, launch_draw, launch_ratio
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
    lengths: mx.array  # [B], index of the last token in its sequence
    rounds: mx.array  # [B], steps that the sequence has been through
    recent: mx.array  # [B, L], the last tokens, -1 where there is none; L = 0 without penalties
    remaining: mx.array  # [B], tokens that may still be generated
    counts: mx.array | None = None  # [B, V], how often each token was generated, if a penalty needs it
    noise: Callable[[], dict[Purpose, Keys]] | None = None  # returns keys [B, W] of the next positions, made once

    @property
    def sampler(self) -> Sampler:
        return Sampler(*self.controls.packed, self.lengths, self.rounds, self.controls.truncates)

    def keys(self, purpose: Purpose, first: int, count: int) -> Keys:
        """Return keys [B, count] for the positions `first` after the next token's."""
        if self.noise is None:
            positions = self.lengths[:, None] + mx.arange(first + 1, first + 1 + count)
            return self.controls.noise_keys(self.rounds, positions)[purpose]
        one, other = self.noise()[purpose]
        return one[:, first : first + count], other[:, first : first + count]


class Proposal(NamedTuple):
    tokens: mx.array  # [B, k]
    q: list[mx.array]  # together [B, k, V], what each draft was drawn from, if a sequence uses the ratio rule
    valid: mx.array | None = None  # [B], drafts from the left that may be accepted; None: all
    rows: DraftRows = DraftRows([], [])  # in place of `q` where kernels verify


def propose(logits: mx.array, proposal: Proposal, context: BatchContext, certain: mx.array | None = None) -> Proposal:
    """Add W drafts to each sequence, sampled from a drafter's logits [B, W, V] as the target would be.

    Tokens with a logit of -inf are never drafted: the ratio rule then draws them after a rejection. With penalties,
    W must be 1: every draft changes what the next is drawn from.

    Args:
        certain: [B, W], drafts that are certain whatever the drafter says, -1 where there is none.
    """
    controls = context.controls
    j = proposal.tokens.shape[1]
    drawn: Distribution | Draws | None = None
    if controls.argmax_only:
        token = mx.argmax(logits, axis=-1).astype(mx.int32)
    else:
        logits = _adjust(logits, context, proposal.tokens, j)
        token, drawn = _draw(logits, context, Purpose.DRAFT, j)
    if certain is not None:
        token = mx.where(certain >= 0, certain, token)
    q, rows = proposal.q, proposal.rows
    if "ratio" in controls.rules and isinstance(drawn, Draws):
        rows = rows.add(logits, drawn.cuts, certain)
    elif "ratio" in controls.rules and isinstance(drawn, Distribution):
        q = [*q, drawn.dense(logits.shape[-1])]
        if certain is not None:
            q[-1] = mx.where(certain[..., None] >= 0, _point_mass(token, q[-1].shape[-1]), q[-1])
    return Proposal(mx.concatenate([proposal.tokens, token], axis=1), q, rows=rows)


def propose_certain(certain: mx.array, controls: Controls, vocabulary: int) -> Proposal:
    """Propose drafts [B, k] that are certain, from the left, and none where they are -1."""
    tokens, valid = mx.maximum(certain, 0), (certain >= 0).sum(axis=1)
    if "ratio" not in controls.rules or not certain.shape[1]:
        return Proposal(tokens, [], valid)
    if draw_fits(vocabulary) and controls.kernels_suffice:
        unread, cuts = mx.zeros((1, 1, 1), mx.bfloat16), mx.zeros((*tokens.shape, 4), mx.int32)
        return Proposal(tokens, [], valid, DraftRows([], []).add(unread, cuts, tokens))
    return Proposal(tokens, [_point_mass(tokens, vocabulary)], valid)


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
    logits = _adjust(logits, context, drafts, 0, permitted)
    if controls.rules == {"ratio"}:
        return _accept_by_ratio(_distribution(logits, context, 0), proposal, allowed, context)
    # For coupled sequences NEXT and DRAFT have one key: the drafter used the same noise.
    samples, target = _draw(logits, context, Purpose.NEXT, 0)
    assert isinstance(target, Distribution), "a kernel verifies what it has drawn"
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


def draw_window(
    logits: mx.array,
    proposal: Proposal,
    window: mx.array,
    max_k: mx.array,
    context: BatchContext,
    permitted: mx.array | None = None,
) -> BestTokens | None:
    """Do by kernels what `accept_window` does, up to counting the drafts of the `window` [B, k+1] that agree with the
    tokens that are returned; None where there is no kernel for a sequence of the batch."""
    controls = context.controls
    if controls.argmax_only or not controls.kernels_suffice or not draw_fits(logits.shape[-1]):
        return None
    adjusted = _adjust(logits, context, proposal.tokens, 0, permitted)
    drawn = launch_draw(adjusted, context.sampler)
    # What was forbidden or penalised may be NaN too.
    finite = drawn.finite if adjusted is logits else mx.isfinite(logits.max(axis=-1)).astype(mx.int32)
    if "ratio" not in controls.rules or window.shape[1] == 1:
        return BestTokens(drawn.tokens, finite)
    tokens, most = launch_ratio(adjusted, drawn, window, proposal.rows, context.sampler, max_k, context.remaining)
    return BestTokens(tokens, finite, most)


def _adjust(
    logits: mx.array, context: BatchContext, drafts: mx.array, first: int, permitted: mx.array | None = None
) -> mx.array:
    """Return the logits to sample from at window positions `first`, `first` + 1, …, given the drafts before each."""
    controls = context.controls
    if controls.adjusts:
        here = mx.arange(first, first + logits.shape[1])  # [W]
        text = mx.concatenate([context.recent, drafts], axis=1)
        seen = text[:, here[:, None] + mx.arange(context.recent.shape[1])]  # [B, W, L]
        counts = None if context.counts is None else _window_counts(context.counts, drafts, here)
        logits = process_logits(logits, controls, seen, context.remaining[:, None] - here, counts)
    return logits if permitted is None else mx.where(permitted, logits, -mx.inf)


def _distribution(logits: mx.array, context: BatchContext, first: int) -> Distribution:
    """Return what adjusted logits are at window positions `first`, `first` + 1, …"""
    controls = context.controls
    xtc = None if controls.xtc is None else uniform(context.keys(Purpose.XTC, first, logits.shape[1]))
    return sampling_distribution(logits.astype(mx.float32), controls, xtc)


def _draw(
    logits: mx.array, context: BatchContext, purpose: Purpose, first: int
) -> tuple[mx.array, Distribution | Draws]:
    """Draw a token [B, W] from each row of adjusted logits, at window positions `first`, `first` + 1, …

    What a sequence draws must not depend on the others. So a kernel, where there is one, draws for all sequences but
    those with XTC, whatever the others need.
    """
    controls, drawn = context.controls, None
    if draw_fits(logits.shape[-1]):
        drawn = launch_draw(logits, context.sampler, first if purpose == Purpose.DRAFT else None)
        if controls.kernels_suffice:
            return drawn.tokens, drawn
    distribution = _distribution(logits, context, first)
    if drawn is not None and controls.xtc is None:
        return drawn.tokens, distribution
    tokens = distribution.sample(context.keys(purpose, first, logits.shape[1]))
    if drawn is not None and controls.xtc is not None:
        tokens = mx.where(controls.xtc.probability.squeeze(-1) > 0, tokens, drawn.tokens)
    return tokens, distribution


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
