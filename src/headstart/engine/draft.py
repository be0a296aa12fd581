"""Sources of drafts. The trunk verifies them all alike (`step.py`): a bad source costs time, never a token.

A source is a function that makes a `Proposal` of k drafts per sequence. Some drafts are certain before it runs: the
tokens that a grammar leaves no choice about, and copies from the context. They come from the left, and the source
goes on after them. So far there are two: `head_drafts`, the model's multi-token-prediction head, and `no_drafts`,
which leaves it at the certain ones and serves models without a head.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

import mlx.core as mx

from ..models import Model
from ..sampling import Proposal, propose, propose_certain
from .batch import Batch, UnseenPairs
from .copies import MATCH


class HeadUse(IntEnum):
    """What the head does in a step."""

    NONE = 0
    FULL = 1
    REDUCED = 2  # it scores the model's draft vocabulary only


# (model, batch, k, certain): `certain` are tokens [B, k] from the left, then -1; None if there are none.
Source = Callable[[Model, Batch, int, mx.array | None], Proposal]


def head_drafts(
    model: Model, batch: Batch, k: int, certain: mx.array | None = None, *, reduced: bool = False
) -> Proposal:
    """Return k drafts [B, k] after `batch.last`, and let the head catch up with what was committed.

    The head predicts a token from a pair: the hidden state of one position and the token of the next. The newest pair
    that it has not seen is the trunk's hidden state before `last`, and `last`: its output there gives draft 0. Draft
    j+1 comes from the pair of the head's own output for draft j, and draft j.

    At k = 0 the head does not run. When drafting resumes it replays at most the last `RESUME_PAIRS` pairs that it
    missed, written directly after what its cache holds: older ones never enter it, and its positions stay behind the
    trunk's. A full replay would cost what pausing saves; this way about 2% fewer drafts are accepted.

    `reduced`: only tokens of the model's draft vocabulary are scored.
    """
    proposal = Proposal(mx.zeros((batch.size, 0), mx.int32), [])
    if k == 0:
        return proposal
    batch.collect_unseen()
    hidden = catch_up(model, batch)  # [B, 1, H]
    context = batch.context()
    for j in range(k):
        given = certain[:, j : j + 1] if certain is not None else None
        logits = model.draft_logits(hidden, reduced)
        if reduced and model.draft_vocabulary is not None:
            logits = model.draft_vocabulary.full(logits, model.vocabulary)
        proposal = propose(logits, proposal, context, given)
        if j < k - 1:
            # This pair is written past the head's committed ones: later drafts see it, the next step overwrites it.
            outputs = run_head(model, batch, hidden, proposal.tokens[:, -1:], ahead=j)
            hidden = outputs[(j + 1) % len(outputs)]  # module j makes draft j, cyclically; `catch_up` gave module 0's
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


def catch_up(model: Model, batch: Batch, embeddings: mx.array | None = None) -> mx.array:
    """Run the head over the committed pairs it has not seen, and return its output at the last one, [B, 1, H].

    `embeddings` [B, W, H] take the place of the pairs' tokens.
    """
    hidden, tokens, counts = batch.unseen
    if not batch.unseen.width:  # after a prompt of one token the head has nothing to draft from: any draft will do
        return mx.zeros((batch.size, 1, hidden.shape[-1]), hidden.dtype)
    # A sequence without pairs gets the output of padding: a bad draft costs time, not correctness.
    output = run_head(model, batch, hidden, tokens, last=mx.maximum(counts - 1, 0), embeddings=embeddings)[0]
    assert batch.head_state is not None
    batch.head_state.commit(counts, most=0)  # run_head takes the trunk's bounds before every pass
    batch.unseen = UnseenPairs(hidden[:, :0], tokens[:, :0], mx.zeros_like(counts))
    return output


def run_head(
    model: Model,
    batch: Batch,
    hidden: mx.array,
    tokens: mx.array,
    ahead: int = 0,
    last: mx.array | None = None,
    embeddings: mx.array | None = None,
) -> list[mx.array]:
    """Return each head module's output for these pairs: [B, W, H], or [B, 1, H] at index `last` [B].

    The pairs are written `ahead` positions past the committed ones. Every module has a KV cache of its own and must
    see every pair, although only one module's output is used.
    """
    state = batch.head_state
    assert state is not None, "a batch without a head has no drafts"
    state.bounds = batch.trunk_state.bounds  # the head holds at most as many pairs as the trunk holds tokens
    return [model.head(hidden, tokens, state, ahead, module, last, embeddings) for module in range(len(state.layers))]
