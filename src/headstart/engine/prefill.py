"""Reading a prompt: chunk by chunk, from where a known beginning ends."""

import time

import mlx.core as mx

from ..kernels.cuda import on_cuda
from ..models import Model
from ..state import CHUNK, PrefixCache
from .batch import Batch
from .exact import rows_are_independent
from .request import Event
from .reuse import leave, resume
from .score import score
from .sequence import SequenceState
from .step import prefill


def prefill_chunk(model: Model, row: SequenceState, prefix: PrefixCache | None) -> bool:
    """One more chunk of a row's tokens. True once all but the last are in: that one opens the first window."""
    tokens = row.tokens
    if row.handle.request.score != "no":  # a prompt that is told of must be read from its beginning
        prefix = None
    if row.batch is None:
        _begin(model, row, prefix)
    assert row.batch is not None
    end = min((row.taken // CHUNK + 1) * CHUNK, len(tokens) - 1)
    if row.taken:  # one chunk at a time: progress is real, memory bounded, and a cancel soon heeded
        mx.eval(row.batch.arrays())
        if prefix is not None:
            leave(row.batch, tokens, row.taken, prefix)
        if not row.said and row.taken > row.reported:  # a sequence that is recomputed reports nothing twice
            row.reported = row.taken
            row.handle.put(Event(stats=row.stats.copy(), prompt_processed=row.taken, choice=row.asked.choice))
    if end > row.taken:
        chunk = mx.array([tokens[row.taken : end]], mx.int32)
        hidden = prefill(model, row.batch, chunk, mx.array([tokens[end]], mx.int32))
        mx.async_eval(row.batch.arrays())
        if row.handle.request.score != "no":
            _score(model, row, hidden, end)
        row.taken = end
    if end < len(tokens) - 1:
        return False
    if prefix is not None:
        leave(row.batch, tokens, end, prefix)
        if not row.drafter.ceiling:
            row.batch.forget_head(model)
    return True


def _begin(model: Model, row: SequenceState, prefix: PrefixCache | None) -> None:
    """At the first token, or after those of its beginning that are known."""
    row.batch = Batch.of_one(
        model, row.tokens, row.asked, row.drafter.ceiling, said=row.said, rounds=row.stats.rounds
    )
    row.started = row.started or time.perf_counter()
    exact = rows_are_independent(model) and row.asked.params.rule != "optimistic"
    exact = exact and not (row.said and on_cuda())  # what it said is read as a prompt now, by other kernels
    if prefix is not None:
        row.taken = resume(model, row.batch, row.tokens, prefix)
        exact = exact and not (row.taken and prefix.eight_bits)
    if not row.said:
        row.stats.prefix_cache_hit, row.stats.exact = row.taken, exact
    row.stats.exact = row.stats.exact and exact


def _score(model: Model, row: SequenceState, hidden: mx.array, end: int) -> None:
    """Tell what the model thought of the prompt up to `end`, unless it was told before."""
    begin, end = max(row.taken, row.scored), min(end, len(row.handle.request.prompt) - 1)
    following, top = row.tokens[begin + 1 : end + 1], row.asked.params.top_logprobs
    if following:
        told = score(model, hidden[:, begin - row.taken :], following, top)
        row.handle.put(
            Event(prompt_logprobs=told, stats=row.stats.copy(), prompt_processed=end, choice=row.asked.choice)
        )
        row.scored = end
