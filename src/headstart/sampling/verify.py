"""Draft a token, judge a window: where distributions, noise and the rules of acceptance come together."""

from typing import NamedTuple

import mlx.core as mx

from .accept import AcceptResult, block, coupled, longest, placed, residual
from .controls import Controls
from .distribution import Distribution, adjust, distribution, draw
from .noise import Purpose, uniform


class BatchContext(NamedTuple):
    """Where the rows of a batch stand, as far as sampling must know."""

    controls: Controls
    position: mx.array  # [B], the index in its sequence of the next token
    rounds: mx.array  # [B]
    recent: mx.array  # [B, L], the last tokens, -1 where there is none; L = 0 where no row has a penalty
    remaining: mx.array  # [B], tokens the row may still say
    counts: mx.array | None = None  # [B, V], how often each token was generated, where a penalty counts them


class Proposal(NamedTuple):
    tokens: mx.array  # [B, k]
    q: list[mx.array]  # k × [B, 1, V]: what each was drawn from, where a row is judged by ratio


def propose(logits: mx.array, so_far: Proposal, scene: BatchContext, forced: mx.array | None = None) -> Proposal:
    """One more draft from the head's logits [B, 1, V], drawn as the target would be. `forced` [B, 1]: what a grammar
    leaves no choice but to say, -1 where it does."""
    controls, j = scene.controls, so_far.tokens.shape[1]
    if controls.plain:
        token = mx.argmax(logits, axis=-1).astype(mx.int32)
        if forced is not None:
            token = mx.where(forced >= 0, forced, token)
        return Proposal(mx.concatenate([so_far.tokens, token], axis=1), [])
    positions = (scene.position + j)[:, None]
    expected = _distribution(logits, scene, so_far.tokens, j)
    token = expected.draw(controls.keyed(Purpose.DRAFT, scene.rounds, positions))
    q = expected.dense(logits.shape[-1]) if "ratio" in controls.rules else None
    if forced is not None:  # a draft with certainty: nothing else could have been drawn
        token = mx.where(forced >= 0, forced, token)
        if q is not None:
            certain = (mx.arange(q.shape[-1]) == token[..., None]).astype(q.dtype)
            q = mx.where(forced[..., None] >= 0, certain, q)
    return Proposal(mx.concatenate([so_far.tokens, token], axis=1), so_far.q if q is None else [*so_far.q, q])


def accept_window(
    logits: mx.array, proposal: Proposal, allowed: mx.array, scene: BatchContext, grammar: mx.array | None = None
) -> AcceptResult:
    """The target's logits [B, k+1, V] → how many drafts stand and what follows. `grammar`: what it permits."""
    controls, drafts = scene.controls, proposal.tokens
    if controls.plain:
        if grammar is not None:
            logits = mx.where(grammar, logits, -mx.inf)
        return coupled(mx.argmax(logits, axis=-1).astype(mx.int32), drafts, allowed)
    target = _distribution(logits, scene, drafts, 0, grammar)
    positions = scene.position[:, None] + mx.arange(logits.shape[1])
    verdict = None
    if controls.rules != {"ratio"}:
        choices = target.draw(controls.keyed(Purpose.RESIDUAL, scene.rounds, positions))
        verdict = coupled(choices, drafts, allowed)
        if "optimistic" in controls.rules:
            stands = allowed if grammar is None else mx.minimum(allowed, _lawful(drafts, grammar))
            following = mx.take_along_axis(choices, stands[:, None], axis=1).squeeze(1)
            verdict = _either(controls.optimistic, placed(drafts, stands, following), verdict)
    if "ratio" in controls.rules:
        by_ratio = _by_ratio(target, proposal, allowed, scene, positions)
        verdict = by_ratio if verdict is None else _either(controls.ratio, by_ratio, verdict)
    assert verdict is not None
    return verdict


def _by_ratio(
    target: Distribution, proposal: Proposal, allowed: mx.array, scene: BatchContext, positions: mx.array
) -> AcceptResult:
    controls, drafts, k = scene.controls, proposal.tokens, proposal.tokens.shape[1]
    after = controls.keyed(Purpose.RESIDUAL, scene.rounds, positions)
    if k == 0:
        return placed(drafts, mx.zeros_like(allowed), target.draw(after).squeeze(1))
    q = mx.concatenate(proposal.q, axis=1)  # [B, k, V]
    window = Distribution(target.ids if target.ids is None else target.ids[:, :k], target.logp[:, :k])
    p, q_there = mx.exp(target.logp), window.aligned(q)
    q_drafts = mx.take_along_axis(q, drafts[..., None], axis=-1).squeeze(-1)
    chances = block(p, q_there, window.chance(drafts), q_drafts, allowed)
    tried = uniform(controls.keyed(Purpose.ACCEPT, scene.rounds, positions[:, :k]))
    accepted = longest(chances.chance, tried)
    left = mx.log(residual(p, q_there, chances.carry, accepted, allowed))  # [B, C]
    here = accepted[:, None]
    ids = None
    if target.ids is not None:
        ids = mx.take_along_axis(target.ids, here[..., None], axis=1).squeeze(1)
    keys = tuple(mx.take_along_axis(word, here, axis=1).squeeze(1) for word in after)
    return placed(drafts, accepted, draw(left, ids, (keys[0], keys[1])))


def _distribution(
    logits: mx.array, scene: BatchContext, drafts: mx.array, first: int, grammar: mx.array | None = None
) -> Distribution:
    """What to draw from at window positions `first`, `first` + 1, …, given the drafts before each."""
    controls, width = scene.controls, logits.shape[1]
    here = mx.arange(first, first + width)
    logits = logits.astype(mx.float32)
    if controls.adjusts:
        length = scene.recent.shape[1]
        text = mx.concatenate([scene.recent, drafts], axis=1)
        seen = text[:, here[:, None] + mx.arange(length)]  # [B, W, L]
        counts = None if scene.counts is None else _counts_in_window(scene.counts, drafts, here)
        logits = adjust(logits, controls, seen, scene.remaining[:, None] - here, counts)
    if grammar is not None:
        logits = mx.where(grammar, logits, -mx.inf)
    return distribution(logits, controls, controls.coins(scene.rounds, scene.position[:, None] + here))


def _counts_in_window(counts: mx.array, drafts: mx.array, here: mx.array) -> mx.array:
    """Return [B, W, V]: the counts [B, V] at window positions `here` [W], with the drafts [B, k] before each."""
    B, k = drafts.shape
    W = here.shape[0]
    window = mx.broadcast_to(counts[:, None], (B, W, counts.shape[-1]))
    if k == 0:
        return window
    before = (mx.arange(k) < here[:, None]).astype(counts.dtype)  # [W, k]
    rows, columns = mx.arange(B)[:, None, None], mx.arange(W)[None, :, None]
    return window.at[rows, columns, drafts[:, None]].add(mx.broadcast_to(before, (B, W, k)))


def _lawful(drafts: mx.array, grammar: mx.array) -> mx.array:
    """[B]: how many drafts come before the first that the grammar forbids."""
    permitted = mx.take_along_axis(grammar[:, : drafts.shape[1]], drafts[..., None], axis=-1).squeeze(-1)
    return mx.cumprod(permitted.astype(mx.int32), axis=1).sum(axis=1)


def _either(first: mx.array, a: AcceptResult, b: AcceptResult) -> AcceptResult:
    """Row by row: `a` where `first` [B] is true."""
    return AcceptResult(mx.where(first, a.accepted, b.accepted), mx.where(first[:, None], a.tokens, b.tokens))
