"""Sources of drafts. The trunk verifies them all alike (`step.py`): a bad source costs time, never a token.

A source is a function in `SOURCES` that makes a `Proposal` of k drafts per sequence. Some drafts are given
before it runs: tokens that a grammar leaves no choice about, and copies from the context. They come from the left,
and the source goes on after them. What a source remembers of a sequence is a state of the `Batch`, which follows
commits, joins and leaves. The depth controller learns what each source earns, and names the one for a step.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import mlx.core as mx

from ..models import Model
from ..models.dflash import DFlash
from ..sampling import Proposal
from ..state import BatchState
from .batch import Batch
from .copies import MATCH


class Source(IntEnum):
    """What drafts in a step, after the given drafts."""

    NONE = 0
    HEAD = 1
    REDUCED = 2  # the head, which scores the model's draft vocabulary only
    BLOCK = 3  # the block drafter
    ASSISTANT = 4  # Gemma 4's


def draft_limits(model: Model) -> dict[Source, int]:
    """Return the most drafts per step of every source that a model has. A fixed k asks for drafts of the first."""
    limits = {}
    if model.drafter is not None:
        limits[Source.BLOCK if isinstance(model.drafter, DFlash) else Source.ASSISTANT] = model.drafter.max_k
    if model.has_head:
        limits[Source.HEAD] = model.max_k
    if model.draft_vocabulary is not None:
        limits[Source.REDUCED] = model.max_k
    return limits


def head_drafts(
    model: Model, batch: Batch, k: int, given: mx.array | None = None, *, reduced: bool = False
) -> Proposal:
    """Return k drafts [B, k] after `batch.last`, and let the head see what was committed.

    The head predicts a token from a pair: the hidden state of one position and the token of the next. The newest pair
    that it has not seen is the trunk's hidden state before `last`, and `last`: its output there gives draft 0.

    At k = 0 the head does not run. When drafting resumes it replays at most the last `RESUME_PAIRS` pairs that it
    missed, written directly after what its cache holds: older ones never enter it, and its positions stay behind the
    trunk's. A full replay would cost what pausing saves; this way about 2% fewer drafts are accepted.

    `reduced`: only tokens of the model's draft vocabulary are scored.
    """
    if k == 0:
        return Proposal.none(batch.size)
    batch.collect_unseen()
    head, state = model.reduced_head if reduced else model.draft_head, _head_state(batch)
    drafts = model.backend.draft(head, state, batch.unseen, k, batch.context(k + 1), given)
    _keep_unseen(model, batch)
    return drafts


def see_pairs(model: Model, batch: Batch, embeddings: mx.array | None = None) -> None:
    """Let the head see the committed pairs that it has not seen. `embeddings` [B, T, H] take the place of their
    tokens."""
    if model.has_head:
        model.backend.see(model.draft_head, _head_state(batch), batch.unseen, embeddings)
    _keep_unseen(model, batch)


def _head_state(batch: Batch) -> BatchState:
    assert batch.head_state is not None, "a batch without a head has no drafts"
    batch.head_state.bounds = batch.trunk_state.bounds  # it holds at most as many pairs as the trunk holds tokens
    return batch.head_state


def _keep_unseen(model: Model, batch: Batch) -> None:
    """Keep the last pairs of all modules but the first: they are not final, and run again with the next ones."""
    assert batch.head_state is not None
    batch.unseen = batch.unseen.latest(model.head_modules - 1)
    if model.head_modules > 1:
        batch.head_state.commit(-batch.unseen.counts, most=0)


def block_drafts(model: Model, batch: Batch, k: int, given: mx.array | None = None) -> Proposal:
    """Return k drafts of the block drafter, all from one pass: each has a distribution of its own given the context,
    or, if the drafter selects, given the draft before it.

    Its caches of the context are up to date: the trunk's passes fill them.
    """
    proposal = Proposal.none(batch.size)
    if k == 0:
        return proposal
    assert isinstance(model.drafter, DFlash)
    context, selects = batch.context(k + 1), model.drafter.selects
    logits, hidden = model.block_logits(batch.last, k, batch.trunk_state)
    width = 1 if selects or context.controls.adjusts else k  # with penalties, a draft changes what follows
    for j in range(0, k, width):
        here_given = given[:, j : j + width] if given is not None else None
        here = logits[:, j : j + width]
        if selects:
            before = proposal.tokens[:, -1] if j else batch.last
            here = model.drafter.rescore(model.backend, here, hidden[:, j : j + 1], before)
        proposal = model.backend.propose(here, proposal, context, here_given)
    return proposal


def assistant_drafts(model: Model, batch: Batch, k: int, given: mx.array | None = None) -> Proposal:
    """Return k drafts of Gemma 4's assistant, each from the one before it.

    It has no state: it is given the newest of the trunk's hidden states, and reads the trunk's caches.
    """
    proposal = Proposal.none(batch.size)
    if k == 0:
        return proposal
    batch.collect_unseen()
    batch.unseen = batch.unseen.latest(1)
    token, hidden, context = batch.last, batch.unseen.hidden, batch.context(k + 1)
    if not batch.unseen.width:  # a prompt of one token: any draft will do
        hidden = mx.zeros((batch.size, 1, hidden.shape[-1]), hidden.dtype)
    draft = model.assistant_drafts(batch.trunk_state)
    for j in range(k):
        logits, hidden = draft(model.backend, model.embed, hidden, token)
        here_given = given[:, j : j + 1] if given is not None else None
        proposal = model.backend.propose(logits, proposal, context, here_given)
        token = proposal.tokens[:, -1]
    return proposal


def no_drafts(model: Model, batch: Batch, k: int, given: mx.array | None = None) -> Proposal:
    """Return the given drafts alone. The head, if there is one, does not run."""
    if given is None:
        given = mx.full((batch.size, k), -1, mx.int32)
    return model.backend.propose_given(given, batch.controls, model.vocabulary)


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


# (model, batch, k, given): `given` are tokens [B, k] from the left, then -1; None if there are none.
SOURCES: dict[int, Callable[[Model, Batch, int, mx.array | None], Proposal]] = {
    Source.NONE: no_drafts,
    Source.HEAD: head_drafts,
    Source.REDUCED: partial(head_drafts, reduced=True),
    Source.BLOCK: block_drafts,
    Source.ASSISTANT: assistant_drafts,
}
