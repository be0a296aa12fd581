"""Sources of drafts. The trunk verifies them all alike (`step.py`): a bad source costs time, never a token.

A source is a function in `SOURCES` that makes a `Proposal` of k drafts per sequence. Some drafts are certain before
it runs: the tokens that a grammar leaves no choice about, and copies from the context. They come from the left, and
the source goes on after them. What a source remembers of a sequence is a state of the `Batch`, which follows commits,
joins and leaves. The depth controller learns what each source earns, and names the one that drafts in a step.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import mlx.core as mx

from ..kernels.attention import at_last
from ..kernels.cuda.sampling import draw_fits
from ..models import Model
from ..sampling import BatchContext, Proposal, propose, propose_certain
from .batch import Batch
from .copies import MATCH


class Source(IntEnum):
    """What drafts in a step, after the certain drafts."""

    NONE = 0
    HEAD = 1
    REDUCED = 2  # the head, which scores the model's draft vocabulary only
    BLOCK = 3  # the block drafter


def draft_limits(model: Model) -> dict[Source, int]:
    """Return the most drafts per step of every source that a model has. A fixed k asks for drafts of the first."""
    limits = {Source.BLOCK: model.drafter.max_k} if model.drafter is not None else {}
    if model.has_head:
        limits[Source.HEAD] = model.max_k
    if model.draft_vocabulary is not None:
        limits[Source.REDUCED] = model.max_k
    return limits


Extend = Callable[[mx.array, int], mx.array]  # the output of a head's module [B, 1, H] → the drafts so far [B, j]


def head_drafts(
    model: Model, batch: Batch, k: int, certain: mx.array | None = None, *, reduced: bool = False
) -> Proposal:
    """Return k drafts [B, k] after `batch.last`, and let the head catch up with what was committed.

    The head predicts a token from a pair: the hidden state of one position and the token of the next. The newest pair
    that it has not seen is the trunk's hidden state before `last`, and `last`: its output there gives draft 0. Of
    several modules each makes the draft after the one before it (`catch_up`). Once all have made theirs, the last
    goes on alone, from the pair of its own output for a draft, and that draft.

    At k = 0 the head does not run. When drafting resumes it replays at most the last `RESUME_PAIRS` pairs that it
    missed, written directly after what its cache holds: older ones never enter it, and its positions stay behind the
    trunk's. A full replay would cost what pausing saves; this way about 2% fewer drafts are accepted.

    `reduced`: only tokens of the model's draft vocabulary are scored.
    """
    proposal = Proposal(mx.zeros((batch.size, 0), mx.int32), [])
    if k == 0:
        return proposal
    batch.collect_unseen()
    context = batch.context(k + 1)
    if certain is None and (drafts := _chain_drafts(model, batch, k, reduced, context)):
        return drafts

    def extend(hidden: mx.array, module: int) -> mx.array:
        """Return the drafts so far, with one more from a module's output [B, 1, H] unless there are k."""
        nonlocal proposal
        if (j := proposal.tokens.shape[1]) < k:
            given = certain[:, j : j + 1] if certain is not None else None
            proposal = propose(model.draft_logits(hidden, reduced, module=module), proposal, context, given)
        return proposal.tokens

    catch_up(model, batch, extend, k)
    return proposal


def _chain_drafts(model: Model, batch: Batch, k: int, reduced: bool, context: BatchContext) -> Proposal | None:
    """Do what `head_drafts` does with one module where that is a graph by itself: every draft is the argmax, or drawn
    by a kernel from the head's own logits."""
    pairs, state, controls = batch.unseen, batch.head_state, batch.controls
    drawn = controls.kernels_suffice and not controls.adjusts and draw_fits(model.vocabulary)
    if not pairs.width or not (controls.argmax_only or drawn):
        return None
    assert state is not None, "a batch without a head has no drafts"
    state.bounds = batch.trunk_state.bounds
    sampler = () if controls.argmax_only else context.sampler
    chain = model.chain_drafts(pairs, state, k, reduced, bool(sampler) and "ratio" in controls.rules, *sampler)
    if chain is None:
        return None
    batch.unseen = pairs.latest(0)
    return Proposal(chain[0], [], rows=chain[1])


def block_drafts(model: Model, batch: Batch, k: int, certain: mx.array | None = None) -> Proposal:
    """Return k drafts of the block drafter, all from one pass: each has a distribution of its own given the context,
    or, if the drafter selects, given the draft before it.

    Its caches of the context are up to date: the trunk's passes fill them.
    """
    proposal = Proposal(mx.zeros((batch.size, 0), mx.int32), [])
    if k == 0:
        return proposal
    assert model.drafter is not None
    context, selects = batch.context(k + 1), model.drafter.selects
    logits, hidden = model.block_logits(batch.last, k, batch.trunk_state)
    width = 1 if selects or context.controls.adjusts else k  # with penalties, a draft changes what follows
    for j in range(0, k, width):
        given = certain[:, j : j + width] if certain is not None else None
        here = logits[:, j : j + width]
        if selects:
            here = model.drafter.rescore(here, hidden[:, j : j + 1], proposal.tokens[:, -1] if j else batch.last)
        proposal = propose(here, proposal, context, given)
    return proposal


def no_drafts(model: Model, batch: Batch, k: int, certain: mx.array | None = None) -> Proposal:
    """Return the certain drafts alone. The head, if there is one, does not run."""
    if certain is None:
        certain = mx.full((batch.size, k), -1, mx.int32)
    return propose_certain(certain, batch.controls, model.vocabulary)


def copy_drafts(batch: Batch, k: int, distances: Sequence[int]) -> mx.array:
    """Return for each sequence the k tokens that followed `distances[b]` tokens ago, [B, k]; -1 without a copy.

    The host chose the distances before it saw the last step's tokens. So the device compares the last MATCH tokens
    with those of the copy: it goes on while they are equal, and stops by itself.
    """
    last, distance = batch.trunk_state.lengths[:, None], mx.array(list(distances), mx.int32)[:, None]  # [B, 1]
    newest = last - mx.arange(MATCH)
    repeats = batch.tokens_at(newest) == batch.tokens_at(mx.maximum(newest - distance, 0))  # [B, MATCH]
    # What is less than k tokens back repeats itself again.
    at = last + 1 - distance + mx.arange(k) % mx.maximum(distance, 1)
    copied = repeats.all(axis=1, keepdims=True) & (distance > 0)
    return mx.where(copied, batch.tokens_at(mx.maximum(at, 0)), -1)


# (model, batch, k, certain): `certain` are tokens [B, k] from the left, then -1; None if there are none.
SOURCES: dict[int, Callable[[Model, Batch, int, mx.array | None], Proposal]] = {
    Source.NONE: no_drafts,
    Source.HEAD: head_drafts,
    Source.REDUCED: partial(head_drafts, reduced=True),
    Source.BLOCK: block_drafts,
}


def catch_up(
    model: Model, batch: Batch, extend: Extend | None = None, k: int = 0, *, embeddings: mx.array | None = None
) -> None:
    """Run the head over the committed pairs it has not seen, and pass what follows the last one to `extend`, k times.

    Every module has a KV cache of its own and sees every pair: module j the token that is j further on, and the
    hidden state that module j - 1 made of the same position, or the trunk's (`HeadSpec.chained`). Tokens after the
    last committed one are drafts, so the last pairs of all modules but the first are not final. They stay in
    `batch.unseen`, to be run again with the next ones. `embeddings` [B, T, H] take the place of the pairs' tokens;
    several modules do without: their drafts are worse.
    """
    pairs, state, modules = batch.unseen, batch.head_state, model.head_modules
    assert state is not None, "a batch without a head has no drafts"
    state.bounds = batch.trunk_state.bounds  # the head holds at most as many pairs as the trunk holds tokens
    drafts, fed = mx.zeros((batch.size, 0), mx.int32), pairs.hidden
    # A sequence without pairs gets the output of padding: a bad draft costs time, not correctness.
    last = mx.maximum(pairs.counts - 1, 0)
    hidden = mx.zeros((batch.size, 1, fed.shape[-1]), fed.dtype)  # after a prompt of one token any draft will do
    for module in range(modules):
        if pairs.width:
            chains = model.family.head.chained and module < modules - 1
            tokens, at = pairs.following(drafts, module), None if chains else last
            hidden = model.head(fed, tokens, state, 0, module, at, embeddings if modules == 1 else None)
            fed, hidden = (hidden, at_last(hidden, last)) if chains else (fed, hidden)
        if extend is not None:
            drafts = extend(hidden, module)
    state.commit(pairs.counts, most=0)
    if extend is not None:
        for ahead in range(k - modules):
            # This pair is written past the committed ones: later drafts see it, the next step overwrites it.
            hidden = model.head(hidden, drafts[:, -1:], state, ahead, modules - 1)
            drafts = extend(hidden, modules - 1)
    batch.unseen = pairs.latest(modules - 1)
    if modules > 1:
        state.commit(-batch.unseen.counts, most=0)
