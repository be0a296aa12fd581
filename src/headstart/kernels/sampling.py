"""Draw drafts, and choose and accept tokens of a window, by MLX's own operations.

A sequence is verified by the rule of its request: Gumbel coupling (greedy is its limit), speculative sampling with
block verification (`_by_ratio`), or the optimistic rule, which accepts every draft and is not exact.
"""

import mlx.core as mx

from ..sampling import (
    AcceptResult,
    BatchContext,
    Choice,
    Controls,
    Logprobs,
    Proposal,
    Verdict,
    allowed_drafts,
    logprobs,
)
from ..sampling.accept import accept_coupled, accept_first, block_acceptance, longest_accepted, residual_distribution
from ..sampling.distribution import Distribution, gumbel_argmax, process_logits, sampling_distribution
from ..sampling.noise import Purpose, uniform


class SamplingSteps:
    """Draw tokens, and accept drafts."""

    def best_tokens(self, logits: mx.array) -> mx.array:
        """Return the argmax [...] of logits [..., V], int32."""
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def propose(
        self, logits: mx.array, proposal: Proposal, context: BatchContext, given: mx.array | None = None
    ) -> Proposal:
        """Add W drafts to each sequence, sampled from a drafter's logits [B, W, V] as the target would be.

        Tokens with a logit of -inf are never drafted: the ratio rule then draws them after a rejection. With
        penalties, W must be 1: every draft changes what the next is drawn from.

        Args:
            given: [B, W], drafts that are given, whatever the drafter says, -1 where there is none.
        """
        controls, sources = context.controls, proposal.sources
        if controls.argmax_only:
            token = self.best_tokens(logits)
        else:
            first = proposal.tokens.shape[1]
            logits = adjust(logits, context, proposal.tokens, first)
            token, drawn = self.draw(logits, context, Purpose.DRAFT, first)
        if given is not None:
            token = mx.where(given >= 0, given, token)
        if "ratio" in controls.rules:
            q = drawn.dense(logits.shape[-1])
            if given is not None:
                q = mx.where(given[..., None] >= 0, point_mass(token, q.shape[-1]), q)
            sources = (*sources, (q,))
        return Proposal(mx.concatenate([proposal.tokens, token], axis=1), sources)

    def propose_given(self, given: mx.array, controls: Controls, vocabulary: int) -> Proposal:
        """Propose drafts [B, k] that are given, from the left, and none where they are -1."""
        tokens, valid = mx.maximum(given, 0), (given >= 0).sum(axis=1)
        if "ratio" not in controls.rules or not given.shape[1]:
            return Proposal(tokens, (), valid)
        return Proposal(tokens, ((point_mass(tokens, vocabulary),),), valid)

    def choose(
        self,
        logits: mx.array,
        window: mx.array,
        proposal: Proposal,
        max_k: mx.array,
        context: BatchContext,
        permitted: mx.array | None = None,
    ) -> Choice:
        """Choose tokens by the target's logits [B, W, V] for a window [B, W], each sequence by its own rule.

        Args:
            max_k: [B], most drafts to accept.
            permitted: [B, W, V], the tokens that grammars permit at each position.
        """
        # argmax over NaNs is token 0, but max() passes the NaN on.
        controls, finite = context.controls, mx.isfinite(logits.max(axis=-1)).astype(mx.int32)
        drafts = proposal.tokens
        if controls.argmax_only:
            if permitted is not None:
                logits = mx.where(permitted, logits, -mx.inf)
            return Choice(self.best_tokens(logits), finite)
        allowed = allowed_drafts(max_k, context.remaining, drafts.shape[1])
        logits = adjust(logits, context, drafts, 0, permitted)
        if controls.rules == {"ratio"}:
            result = _by_ratio(distribution(logits, context, 0), proposal, allowed, context)
            return Choice(result.tokens, finite, result.accepted)
        # For coupled sequences NEXT and DRAFT have one key: the drafter used the same noise.
        tokens, target = self.draw(logits, context, Purpose.NEXT, 0)
        most = allowed
        if "optimistic" in controls.rules:
            accepted = allowed if permitted is None else mx.minimum(allowed, count_permitted(drafts, permitted))
            next_token = mx.take_along_axis(tokens, accepted[:, None], axis=1).squeeze(1)
            result = accept_first(drafts, accepted, next_token)
            tokens = mx.where(controls.optimistic[:, None], result.tokens, tokens)
            most = mx.where(controls.optimistic, accepted, most)
        if "ratio" in controls.rules:
            result = _by_ratio(target, proposal, allowed, context)
            tokens = mx.where(controls.ratio[:, None], result.tokens, tokens)
            most = mx.where(controls.ratio, result.accepted, most)
        return Choice(tokens, finite, most)

    def accept(self, choice: Choice, window: mx.array, max_k: mx.array, context: BatchContext) -> Verdict:
        """Accept the drafts of a window [B, W], all but its first token, while they are the chosen tokens."""
        k = window.shape[1] - 1
        allowed = allowed_drafts(max_k, context.remaining, k)
        most = allowed if choice.most is None else mx.minimum(allowed, choice.most)
        result = accept_coupled(choice.tokens, window[:, 1:], most)
        accepted = result.accepted
        # Positions after the last generated token do not count.
        finite = (choice.finite > 0) | (mx.arange(k + 1) > accepted[:, None])
        generated, lengths = accepted + 1, context.lengths
        places = lengths[:, None] + 1 + mx.arange(k + 1)
        after = lengths + generated, context.remaining - generated, context.rounds + 1
        decided = accepted, allowed, finite.all(axis=1).astype(mx.int32), generated, result.next
        return Verdict(choice.tokens, *decided, *after, places)

    def logprobs(self, logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
        """Return the log-probabilities of `tokens` [B, W] and of the `top` best tokens under logits [B, W, V]."""
        return logprobs(logits, tokens, top)

    def draw(
        self, logits: mx.array, context: BatchContext, purpose: Purpose, first: int
    ) -> tuple[mx.array, Distribution]:
        """Draw a token [B, W] from each row of adjusted logits [B, W, V], at window positions `first`, `first` + 1,
        …, and return what it was drawn from."""
        drawn_from = distribution(logits, context, first)
        return drawn_from.sample(context.keys(purpose, first, logits.shape[1])), drawn_from


def adjust(
    logits: mx.array, context: BatchContext, drafts: mx.array, first: int, permitted: mx.array | None = None
) -> mx.array:
    """Return the logits to sample from at window positions `first`, `first` + 1, …, given the drafts before each."""
    controls = context.controls
    if controls.adjusts:
        here = mx.arange(first, first + logits.shape[1])  # [W]
        text = mx.concatenate([context.recent, drafts], axis=1)
        seen = text[:, here[:, None] + mx.arange(context.recent.shape[1])]  # [B, W, L]
        counts = None if context.counts is None else _window_counts(context.counts, drafts, here)
        return process_logits(logits, controls, seen, context.remaining[:, None] - here, counts, permitted)
    return logits if permitted is None else mx.where(permitted, logits, -mx.inf)


def distribution(logits: mx.array, context: BatchContext, first: int) -> Distribution:
    """Return what adjusted logits are at window positions `first`, `first` + 1, …"""
    controls = context.controls
    xtc = None if controls.xtc is None else uniform(context.keys(Purpose.XTC, first, logits.shape[1]))
    return sampling_distribution(logits.astype(mx.float32), controls, xtc)


def point_mass(tokens: mx.array, vocabulary: int) -> mx.array:
    """Return the distribution [B, W, V] of drafts [B, W] that are given."""
    return (mx.arange(vocabulary) == tokens[..., None]).astype(mx.float32)


def _by_ratio(target: Distribution, proposal: Proposal, allowed: mx.array, context: BatchContext) -> AcceptResult:
    """Speculative sampling with block verification: accept, then draw the correction or the bonus token."""
    drafts = proposal.tokens
    k = drafts.shape[1]
    next_keys = context.keys(Purpose.NEXT, 0, k + 1)
    if k == 0:
        return accept_first(drafts, mx.zeros_like(allowed), target.sample(next_keys).squeeze(1))

    window = Distribution(None if target.ids is None else target.ids[:, :k], target.logp[:, :k])
    p = mx.exp(target.logp)  # [B, k+1, C]
    q = mx.concatenate([source[0] for source in proposal.sources], axis=1)  # [B, k, V]
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


def count_permitted(drafts: mx.array, permitted: mx.array) -> mx.array:
    """Return how many drafts come before the first one that a grammar forbids, [B]."""
    each = mx.take_along_axis(permitted[:, : drafts.shape[1]], drafts[..., None], axis=-1).squeeze(-1)
    return mx.cumprod(each.astype(mx.int32), axis=1).sum(axis=1)
