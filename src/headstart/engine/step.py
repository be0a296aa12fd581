"""One decoding step of every sequence in a batch: draft, verify, accept, commit.

The head, a small multi-token-prediction module, drafts k tokens. The trunk, which is the model itself, reads the last
token and the k drafts as one window and computes in a single pass what it would generate after each of them. A first
part of the drafts is accepted. One token of the trunk's own follows: a correction in place of the rejected draft, or
a bonus token where every draft was accepted. So a step generates 1 to k+1 tokens per sequence. How many drafts are
accepted is decided by each request's rule (`sampling/accept.py`, where the head is the drafter and the trunk the
target): greedy and seeded sequences generate exactly the tokens of plain decoding, unseeded ones tokens with the same
distribution. A round is one sequence's part in a step.

Plain decoding is k = 0 and runs the same lines. MLX is lazy: these functions build the step's graph and do not wait
for the device, unless a sequence has a grammar, which must see the drafts on the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..models import Model
from ..sampling import (
    GrammarMasks,
    Logprobs,
    Proposal,
    SamplingParams,
    SequenceParams,
    accept_window,
    logprobs,
    propose,
)
from ..state import CHUNK
from .batch import Batch, UnseenPairs


class StepResult(NamedTuple):
    """The tokens of one step, still on the device. Sequence b generated `tokens[b, : accepted[b] + 1]`."""

    tokens: mx.array  # [B, k+1]
    accepted: mx.array  # [B], drafts accepted
    proposed: mx.array  # [B], drafts that could have been accepted: k, or fewer by the request's limits
    finite: mx.array  # [B], false if the largest logit at a generated position is NaN or infinite
    logits: mx.array  # [B, k+1, V], the trunk's
    logprobs: Logprobs | None  # if a sequence wants them


def step(model: Model, batch: Batch, k: int, grammar: GrammarMasks | None = None) -> StepResult:
    """Generate 1 to k+1 tokens for every sequence."""
    forced = grammar.forced(k) if grammar is not None else None
    proposal = draft(model, batch, k, forced)
    return verify(model, batch, proposal, grammar)


def draft(model: Model, batch: Batch, k: int, forced: mx.array | None = None) -> Proposal:
    """Return k drafts [B, k] after `batch.last`, and let the head catch up with what was committed.

    The head predicts a token from a pair: the hidden state of one position and the token of the next. The newest pair
    that it has not seen is the trunk's hidden state before `last`, and `last`: its output there gives draft 0. Draft
    j+1 comes from the pair of the head's own output for draft j, and draft j.

    At k = 0 the head does not run. When drafting resumes it replays at most the last `RESUME_PAIRS` pairs that it
    missed, written directly after what its cache holds: older ones never enter it, and its positions stay behind the
    trunk's. A full replay would cost what pausing saves; this way about 2% fewer drafts are accepted.

    Args:
        forced: Tokens [B, k] that a grammar leaves no choice about, from the left, then -1.
    """
    proposal = Proposal(mx.zeros((batch.size, 0), mx.int32), [])
    if k == 0:
        return proposal
    batch.collect_unseen()
    hidden = catch_up(model, batch)  # [B, 1, H]
    context = batch.context()
    for j in range(k):
        forced_token = forced[:, j : j + 1] if forced is not None else None
        proposal = propose(model.draft_logits(hidden), proposal, context, forced_token)
        if j < k - 1:
            # This pair is written past the head's committed ones: later drafts see it, the next step overwrites it.
            outputs = run_head(model, batch, hidden, proposal.tokens[:, -1:], ahead=j)
            hidden = outputs[(j + 1) % len(outputs)]  # module j makes draft j, cyclically; `catch_up` gave module 0's
    return proposal


def verify(model: Model, batch: Batch, proposal: Proposal, grammar: GrammarMasks | None = None) -> StepResult:
    """Run the trunk over the drafts, accept what it agrees with, and commit that to the batch."""
    k = proposal.tokens.shape[1]
    window = mx.concatenate([batch.last[:, None], proposal.tokens], axis=1)  # [B, k+1]
    # Only the first token of the window is certain: recurrent layers hold the others back until they are accepted.
    hidden = model.trunk(window, batch.trunk_state, certain=1)  # [B, k+1, H], one pass over all positions
    logits = model.logits(hidden)  # [B, k+1, V], for the token after each position

    # A step always adds a token of its own, so at most remaining - 1 drafts fit. `remaining` is 0 or less in the
    # surplus step of a sequence whose end the host has not read yet.
    allowed = mx.clip(mx.minimum(batch.max_k, batch.remaining - 1), 0, k)  # [B]
    permitted = None
    if grammar is not None:
        # Two launches: the host waits for the drafts alone, and follows them through the grammar while the trunk
        # runs.
        mx.async_eval(proposal.tokens)
        mx.async_eval(logits)
        permitted = grammar.permitted(proposal.tokens)  # [B, k+1, V]
    result = accept_window(logits, proposal, allowed, batch.context(), permitted)
    batch.commit(hidden, result)  # the head sees what is committed here at the beginning of the next step

    # argmax over NaNs is token 0, but max() passes the NaN on. Positions after the last generated token do not count.
    finite = mx.isfinite(logits.max(axis=-1)) | (mx.arange(k + 1) > result.accepted[:, None])
    top = batch.controls.top_logprobs
    scores = logprobs(logits, result.tokens, top) if top is not None else None
    return StepResult(result.tokens, result.accepted, allowed, finite.all(axis=1), logits, scores)


def catch_up(model: Model, batch: Batch) -> mx.array:
    """Run the head over the committed pairs it has not seen, and return its output at the last one, [B, 1, H]."""
    hidden, tokens, counts = batch.unseen
    if not batch.unseen.width:  # after a prompt of one token the head has nothing to draft from: any draft will do
        return mx.zeros((batch.size, 1, hidden.shape[-1]), hidden.dtype)
    # A sequence without pairs gets the output of padding: a bad draft costs time, not correctness.
    output = run_head(model, batch, hidden, tokens, last=mx.maximum(counts - 1, 0))[0]
    assert batch.head_state is not None
    batch.head_state.commit(counts, most=0)  # run_head takes the trunk's bounds before every pass
    batch.unseen = UnseenPairs(hidden[:, :0], tokens[:, :0], mx.zeros_like(counts))
    return output


def run_head(
    model: Model, batch: Batch, hidden: mx.array, tokens: mx.array, ahead: int = 0, last: mx.array | None = None
) -> list[mx.array]:
    """Return each head module's output for these pairs: [B, W, H], or [B, 1, H] at index `last` [B].

    The pairs are written `ahead` positions past the committed ones. Every module has a KV cache of its own and must
    see every pair, although only one module's output is used.
    """
    state = batch.head_state
    assert state is not None, "a batch without a head has no drafts"
    state.bounds = batch.trunk_state.bounds  # the head holds at most as many pairs as the trunk holds tokens
    return [model.head(hidden, tokens, state, ahead, module, last) for module in range(len(state.layers))]


def prefill(model: Model, batch: Batch, tokens: mx.array, following: mx.array) -> mx.array:
    """Run the trunk and the head over a chunk of the prompt [B, T], and return the trunk's output [B, T, H].

    `following` [B] is the token after the chunk. The pair that it makes with the chunk's last hidden state is left
    unseen: the head's state here goes into the prefix cache, and must not depend on the token after the chunk.
    """
    width = tokens.shape[1]
    output = hidden = model.trunk(tokens, batch.trunk_state, certain=width)
    batch.trunk_state.commit(mx.full((batch.size,), width, mx.int32), most=width)
    if batch.head_state is not None:
        hidden = mx.concatenate([batch.unseen.hidden, hidden], axis=1)
        tokens = mx.concatenate([batch.unseen.tokens, tokens[:, 1:], following[:, None]], axis=1)
        one = mx.ones((batch.size,), mx.int32)
        inside = tokens.shape[1] - 1  # pairs whose token lies in the chunk
        if inside:
            batch.unseen = UnseenPairs(hidden[:, :-1], tokens[:, :-1], inside * one)
            catch_up(model, batch)
        batch.unseen = UnseenPairs(hidden[:, -1:], tokens[:, -1:], one)
    return output


def prefill_prompts(model: Model, prompts: Sequence[Sequence[int]], max_k: int, limit: int = 10**6) -> Batch:
    """Return a batch of greedy sequences, one per prompt, prefilled up to the last token.

    For measurements that call `step` without an engine. With `max_k` = 0 the batch has no head.
    """
    batch: Batch | None = None
    for prompt in prompts:
        params = SequenceParams(SamplingParams(), key=0, choice=0, limit=limit)
        sequence = Batch.of_one(model, prompt, params, max_k)
        for start in range(0, len(prompt) - 1, CHUNK):
            end = min(start + CHUNK, len(prompt) - 1)
            prefill(model, sequence, mx.array([prompt[start:end]], mx.int32), mx.array([prompt[end]], mx.int32))
            mx.eval(sequence.arrays())
        if batch is None:
            batch = sequence
        else:
            batch.join(sequence, model)
    assert batch is not None
    mx.eval(batch.arrays())
    return batch
