"""The loop's body: draft, verify, accept, commit.

Plain decoding is speculation with zero drafts, so this is the only generator there is: k = 0 or 8, one row or
many, the same lines. Nothing here waits for the device, unless a row has a grammar: the host must then look at the
drafts. It learns what was said by reading the `StepResult`.
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
    """What one step said, still on the device. Row b says `tokens[b, : accepted[b] + 1]`."""

    tokens: mx.array  # [B, k+1]
    accepted: mx.array  # [B]
    proposed: mx.array  # [B], how many of the k drafts the row was allowed to accept
    finite: mx.array  # [B], false where the model broke down
    logits: mx.array  # [B, k+1, V], the target's
    logprobs: Logprobs | None  # where a row wants them


def step(model: Model, batch: Batch, k: int, guide: GrammarMasks | None = None) -> StepResult:
    """One round of every row, with k drafts: each row says between 1 and k+1 tokens."""
    proposal = draft(model, batch, k, guide.forced(k) if guide is not None else None)  # [B, k] tokens
    return verify(model, batch, proposal, guide)


def verify(model: Model, batch: Batch, proposal: Proposal, guide: GrammarMasks | None = None) -> StepResult:
    """Let the trunk judge the drafts, wherever they come from, and commit what stands."""
    k = proposal.tokens.shape[1]
    window = mx.concatenate([batch.last[:, None], proposal.tokens], axis=1)  # [B, k+1]
    hidden = model.trunk(window, batch.rows, certain=1)  # [B, k+1, H], one pass over all positions
    logits = model.logits(hidden)  # [B, k+1, V], what the model itself would say after each

    allowed = mx.clip(mx.minimum(batch.ceiling, batch.remaining - 1), 0, k)  # [B]
    permitted = None
    if guide is not None:  # the host looks at the drafts while the device works on the trunk
        mx.async_eval(proposal.tokens)
        mx.async_eval(logits)
        permitted = guide.permitted(proposal.tokens)  # [B, k+1, V]
    verdict = accept_window(logits, proposal, allowed, batch.scene(), permitted)
    batch.commit(hidden, verdict)

    # A NaN has no argmax and would come out as token 0; max() lets it through. Up to the last token said:
    sound = mx.isfinite(logits.max(axis=-1)) | (mx.arange(k + 1) > verdict.accepted[:, None])
    wanted = batch.controls.top_logprobs
    told = None if wanted is None else logprobs(logits, verdict.tokens, wanted)
    return StepResult(verdict.tokens, verdict.accepted, allowed, sound.all(axis=1), logits, told)


def draft(model: Model, batch: Batch, k: int, forced: mx.array | None = None) -> Proposal:
    """k tokens that the head expects after `batch.last`.

    At k = 0 the head falls behind, and where it is needed again it sees the latest of what it missed. All of it would
    cost what the head costs when it drafts, in text that was not worth drafting; with the latest 16 pairs 2% fewer
    drafts stand. What it missed was never said, as far as it knows: its positions go on without a gap.

    `forced` [B, k]: the first tokens that grammars leave no choice about, then -1. The chain goes on from them."""
    proposal = Proposal(mx.zeros((batch.size, 0), mx.int32), [])
    if k == 0:
        return proposal
    batch.gather()
    hidden, scene = catch_up(model, batch), batch.scene()  # hidden: [B, 1, H]
    for j in range(k):
        must = forced[:, j : j + 1] if forced is not None else None
        proposal = propose(model.draft_logits(hidden), proposal, scene, must)
        if j < k - 1:
            # Written past the head's committed pairs: the chain sees it, the next catching up overwrites it.
            outputs = show(model, batch, hidden, proposal.tokens[:, -1:], ahead=j)
            hidden = outputs[(j + 1) % len(outputs)]
    return proposal


def catch_up(model: Model, batch: Batch) -> mx.array:
    """Show the head the committed pairs that wait for it → its output at each row's last one, [B, 1, H]."""
    hidden, tokens, counts = batch.waiting
    if not batch.waiting.width:  # after a prompt of one token there is nothing to go by: any draft is as good
        return mx.zeros((batch.size, 1, hidden.shape[-1]), hidden.dtype)
    output = show(model, batch, hidden, tokens, last=mx.maximum(counts - 1, 0))[0]
    assert batch.head is not None
    batch.head.commit(counts, most=0)
    batch.waiting = UnseenPairs(hidden[:, :0], tokens[:, :0], mx.zeros_like(counts))
    return output


def show(
    model: Model, batch: Batch, hidden: mx.array, tokens: mx.array, ahead: int = 0, last: mx.array | None = None
) -> list[mx.array]:
    """Every module of the head sees every pair → their outputs [B, W, H], or [B, 1, H] at `last` [B]. Draft j is
    module j's, in turn."""
    assert batch.head is not None, "a batch without a head has no drafts"
    batch.head.bounds = batch.rows.bounds  # a head holds no more pairs than the trunk holds tokens
    return [model.head(hidden, tokens, batch.head, ahead, module, last) for module in range(len(batch.head.layers))]


def prefill(model: Model, batch: Batch, tokens: mx.array, following: mx.array) -> mx.array:
    """Take in a chunk of the prompt [B, T], all of it certain, and prime the head in the same pass → the trunk's
    output [B, T, H].

    `following` [B] is the prompt's next token. The pair it makes with the chunk's last hidden waits for the next
    chunk: a prefix that ends here must not depend on what comes after it.
    """
    width = tokens.shape[1]
    output = hidden = model.trunk(tokens, batch.rows, certain=width)
    batch.rows.commit(mx.full((batch.size,), width, mx.int32), most=width)
    if batch.head is not None:
        hidden = mx.concatenate([batch.waiting.hidden, hidden], axis=1)
        tokens = mx.concatenate([batch.waiting.tokens, tokens[:, 1:], following[:, None]], axis=1)
        one, rest = mx.ones((batch.size,), mx.int32), tokens.shape[1] - 1
        if rest:
            batch.waiting = UnseenPairs(hidden[:, :-1], tokens[:, :-1], rest * one)
            catch_up(model, batch)
        batch.waiting = UnseenPairs(hidden[:, -1:], tokens[:, -1:], one)
    return output


def prefill_prompts(model: Model, prompts: Sequence[Sequence[int]], ceiling: int, limit: int = 10**6) -> Batch:
    """A row for each prompt, greedy, all of it but its last token taken in, with no engine around them: for what must
    be measured or imposed step by step. With a ceiling of 0 there is no head."""
    running: Batch | None = None
    for prompt in prompts:
        row = Batch.of_one(model, prompt, SequenceParams(SamplingParams(), key=0, choice=0, limit=limit), ceiling)
        for start in range(0, len(prompt) - 1, CHUNK):
            end = min(start + CHUNK, len(prompt) - 1)
            prefill(model, row, mx.array([prompt[start:end]], mx.int32), mx.array([prompt[end]], mx.int32))
            mx.eval(row.arrays())
        if running is None:
            running = row
        else:
            running.join(row, model)
    assert running is not None
    mx.eval(running.arrays())
    return running
