"""One decoding step of every sequence in a batch: draft, verify, accept, commit.

The head, a small multi-token-prediction module, drafts k tokens, or they are copied from the context (`draft.py`).
The trunk, which is the model itself, reads the last token and the k drafts as one window and computes in a single
pass what it would generate after each of them. A first part of the drafts is accepted. One token of the trunk's own
follows: a correction in place of the rejected draft, or a bonus token where every draft was accepted. So a step
generates 1 to k+1 tokens per sequence. How many drafts are accepted is decided by each request's rule
(`sampling/accept.py`, where the drafter is the source of the drafts, and the target the trunk): greedy and seeded
sequences generate exactly the tokens of plain decoding, unseeded ones tokens with the same distribution. A round is
one sequence's part in a step.

Plain decoding is k = 0 and runs the same lines. MLX is lazy: these functions build the step's graph and do not wait
for the device, unless a sequence has a grammar or the model has tables of n-grams on the disk: these must see the
drafts on the host.
"""

from collections.abc import Generator, Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx

from ..models import Model
from ..models.passes import finish
from ..sampling import GrammarMasks, Logprobs, Proposal, SamplingParams, SequenceParams, Verdict
from ..state import CHUNK, UnseenPairs
from ..state.snapshot import Snapshot, take_snapshot
from .batch import Batch
from .draft import SOURCES, Source, copy_drafts, see_pairs


class StepResult(NamedTuple):
    """What one step gave, still on the device."""

    verdict: Verdict
    copied: mx.array  # [B], how many of the drafts were copied from the context
    logits: mx.array  # [B, k+1, V], the trunk's
    logprobs: Logprobs | None  # if a sequence wants them


def step(
    model: Model,
    batch: Batch,
    k: int,
    grammar: GrammarMasks | None = None,
    *,
    source: int = Source.HEAD,
    distances: Sequence[int] = (),
) -> StepResult:
    """Generate 1 to k+1 tokens for every sequence.

    Args:
        source: What drafts after the copies and what a grammar forces.
        distances: How many tokens back each sequence copies from, 0 for those that do not; empty if none does.
    """
    copied = copy_drafts(batch, k, distances) if k and any(distances) else None
    given = grammar.forced(k) if grammar is not None else None  # [B, k] from the left, then -1; so are copies
    if copied is not None and given is not None:  # what a grammar forces comes first
        copied = mx.where(given[:, :1] >= 0, -1, copied)
        given = mx.maximum(given, copied)
    elif copied is not None:
        given = copied
    result = verify(model, batch, SOURCES[source](model, batch, k, given), grammar)
    return result if copied is None else result._replace(copied=(copied >= 0).sum(axis=1))


def verify(model: Model, batch: Batch, proposal: Proposal, grammar: GrammarMasks | None = None) -> StepResult:
    """Run the trunk over the drafts, accept what it agrees with, and commit that to the batch."""
    k, backend = proposal.tokens.shape[1], model.backend
    window = backend.window(batch.last, proposal.tokens)  # [B, k+1]
    # Only the first token of the window is certain: recurrent layers hold the others back until they are accepted.
    hidden, logits = model.score(window, batch.trunk_state)  # one pass over all positions

    max_k = batch.max_k if proposal.valid is None else mx.minimum(batch.max_k, proposal.valid)
    context, permitted = batch.context(k + 1), None
    if grammar is not None:
        # Two launches: the host waits for the drafts alone, and follows them through the grammar while the trunk
        # runs.
        mx.async_eval(proposal.tokens)
        mx.async_eval(logits)
        permitted = grammar.permitted(proposal.tokens)  # [B, k+1, V]
    choice = backend.choose(logits, window, proposal, max_k, context, permitted)
    verdict = backend.accept(choice, window, max_k, context)
    # The head sees what is committed here at the beginning of the next step.
    batch.commit(hidden, verdict)

    top = batch.controls.top_logprobs
    scores = backend.logprobs(logits, verdict.tokens, top) if top is not None else None
    return StepResult(verdict, _zeros(batch.size), logits, scores)


@cache
def _zeros(size: int) -> mx.array:
    return mx.array([0] * size, mx.int32)  # computed already, so that any thread may use it


def prefill_by_layers(
    model: Model,
    batch: Batch,
    tokens: mx.array,
    following: mx.array,
    embeddings: mx.array | None = None,
    keep: int | None = None,
) -> Generator[mx.array, None, Snapshot | None]:
    """Run the trunk and the head over a chunk of the prompt [B, T]. Returns what is after `keep` tokens of it.

    After each of the trunk's layers it yields what may be computed so far.

    `following` [B] is the token after the chunk. The pair that it makes with the chunk's last hidden state is left
    unseen: the head's state here goes into the prefix cache, and must not depend on the token after the chunk.
    `embeddings` [B, T, H] take the place of the chunk's tokens where it holds an image, and of some tokens before it,
    whose pairs heads of several modules read again.
    """
    width = tokens.shape[1]
    shown = None if embeddings is None else embeddings[:, -width:]
    hidden = trunk_hidden = yield from model.by_layers(tokens, batch.trunk_state, width, shown, keep)
    batch.trunk_state.commit(mx.full((batch.size,), width, mx.int32), most=width)
    if (
        batch.head_state is not None
    ):  # a pair is a hidden state and the token after it: the last chunk left one unseen
        hidden = mx.concatenate([batch.unseen.hidden, hidden], axis=1)
        tokens = mx.concatenate([batch.unseen.tokens, tokens[:, 1:], following[:, None]], axis=1)
        one = mx.ones((batch.size,), mx.int32)
        inside = tokens.shape[1] - 1  # pairs whose token lies in the chunk
        if inside:
            batch.unseen = UnseenPairs(hidden[:, :-1], tokens[:, :-1], inside * one)
            see_pairs(model, batch, None if embeddings is None else embeddings[:, -inside:])
        batch.unseen = batch.unseen.extend(hidden[:, -1:], tokens[:, -1:], one)
    if keep is None:
        return None
    return take_snapshot(batch.trunk_state, trunk_hidden[:, keep - batch.unseen.width : keep], kept=True)


def prefill(
    model: Model, batch: Batch, tokens: mx.array, following: mx.array, embeddings: mx.array | None = None
) -> None:
    """Run the trunk and the head over a chunk of the prompt [B, T] at once, as `prefill_by_layers` does."""
    finish(prefill_by_layers(model, batch, tokens, following, embeddings))


def prefill_prompts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_k: int,
    limit: int = 10**6,
    sampling: SamplingParams | None = None,
) -> Batch:
    """Return a batch of sequences, one per prompt, prefilled up to the last token: greedy ones unless `sampling` says
    otherwise.

    For measurements that call `step` without an engine. With `max_k` = 0 the batch has no head.
    """
    batch: Batch | None = None
    for prompt in prompts:
        params = SequenceParams(sampling or SamplingParams(), key=0, choice=0, limit=limit)
        sequence = Batch.of_one(model, prompt, params, max_k)
        for start in range(0, len(prompt) - 1, CHUNK):
            end = min(start + CHUNK, len(prompt) - 1)
            chunk, following = mx.array([prompt[start:end]], mx.int32), mx.array([prompt[end]], mx.int32)
            prefill(model.reading, sequence, chunk, following)
            mx.eval(sequence.arrays())
        if batch is None:
            batch = sequence
        else:
            batch.join(sequence, model)
    assert batch is not None
    mx.eval(batch.arrays())
    return batch
