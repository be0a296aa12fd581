"""Prefill a prompt in chunks, starting after the longest prefix that the prefix cache holds."""

import time
from collections.abc import Sequence

import mlx.core as mx

from ..models import Model
from ..state import CHUNK, Chunks, PrefixCache, UnseenPairs
from ..state.snapshot import States
from .batch import Batch
from .device_error import is_failed_command, is_out_of_memory
from .invariance import is_batch_invariant
from .request import Event
from .sequence import SequenceState
from .step import prefill
from .turns import TurnMarker, chunk_ends


def start_prefill(
    model: Model, sequence: SequenceState, prefix: PrefixCache | None, marker: TurnMarker | None, *, narrowed: bool
) -> None:
    """Make the sequence's own batch, with what the prefix cache holds of its tokens. `narrowed`: passes are not as
    wide as those that it may hold."""
    generated, stats = sequence.num_generated, sequence.stats
    ends = chunk_ends(sequence.tokens, marker, CHUNK)
    sequence.chunks = Chunks.of(sequence.cache_keys, ends, sequence.handle.request.adapter)
    batch = Batch.of_one(model, sequence.tokens, sequence.params, sequence.limits.most, generated, stats.rounds)
    sequence.batch = batch
    if (adapter := sequence.handle.request.adapter) is not None:
        batch.trunk_state.adapt([model.adapters[adapter].index])
    sequence.started = sequence.started or time.perf_counter()
    exact = is_batch_invariant(model) and sequence.params.params.rule != "optimistic" and not model.eight_bit_kv
    if generated and not model.backend.cuts_freely:  # they are recomputed as a prompt, by other kernels
        exact = False
    if prefix is not None:
        sequence.num_prefilled = resume_prefix(model, batch, sequence.tokens, sequence.chunks, prefix)
        otherwise = prefix.eight_bits or (narrowed and not model.backend.cuts_freely)
        exact = exact and not (sequence.num_prefilled and otherwise)
    if not generated:
        stats.prefix_cache_hit = sequence.num_prefilled
        stats.exact = exact
    stats.exact = stats.exact and exact


def prefill_chunk(model: Model, sequence: SequenceState, prefix: PrefixCache | None, widest: int) -> bool:
    """Prefill up to `widest` tokens, but no further than the end of the chunk. Return True once all tokens but the
    last are in: that one opens the first window."""
    assert sequence.batch is not None
    assert sequence.chunks is not None
    tokens, done, images = sequence.tokens, sequence.num_prefilled, sequence.images
    end = min(next((end for end in sequence.chunks.ends if end > done), len(tokens) - 1), done + widest)
    if images is not None and not images.advance(model, done, end):
        return False
    if done:  # wait for the chunk before: progress is real, memory bounded, and a cancelled request stops soon
        mx.eval(sequence.batch.arrays())
        if prefix is not None:
            _store(model, sequence.batch, sequence.chunks, done, prefix)
        if not sequence.num_generated and done > sequence.num_reported:  # not again if it is recomputed
            sequence.num_reported = done
            sequence.put(Event(prompt_processed=done))
    if end > done:
        chunk = mx.array([tokens[done:end]], mx.int32)
        embeddings = None
        if images is not None:
            images.place(sequence.batch, done, end)
            embeddings = images.embed(model, tokens, done, end)
        sequence.launched = done, time.perf_counter()
        prefill(model, sequence.batch, chunk, mx.array([tokens[end]], mx.int32), embeddings)
        mx.async_eval(sequence.batch.arrays())
        sequence.num_prefilled = end
    if end < len(tokens) - 1:
        return False
    if prefix is not None:
        _store(model, sequence.batch, sequence.chunks, end, prefix)
    if images is not None:
        images.finish(sequence.batch)
    return True


def _states(model: Model, batch: Batch) -> States:
    head = [(batch.head_state, model.head_modules)] if batch.head_state is not None else []
    return [(batch.trunk_state, 0), *head]


def resume_prefix(model: Model, batch: Batch, tokens: Sequence[int], chunks: Chunks, prefix: PrefixCache) -> int:
    """Load the longest cached prefix of `tokens` into the batch, and return its length.

    A sequence that does not draft gets a head state all the same, so that every entry serves every sequence.
    """
    if model.has_head and batch.head_state is None:
        batch.head_state = model.make_head_state(1)
    if (found := prefix.resume(chunks, _states(model, batch))) is None:
        return 0
    length, hidden = found
    if batch.head_state is not None:  # the last hidden state pairs with this sequence's own next token
        first = length + 1 - hidden.shape[1]
        following = mx.array([tokens[first : length + 1]], mx.int32)
        batch.unseen = UnseenPairs(hidden, following, mx.array([hidden.shape[1]], mx.int32))
    return length


def _store(model: Model, batch: Batch, chunks: Chunks, length: int, prefix: PrefixCache) -> None:
    """Add the first `length` tokens to the prefix cache, if a chunk ends there."""
    if length in chunks.ends:
        mx.eval(batch.arrays())
        try:
            prefix.store(chunks, chunks.ends.index(length) + 1, _states(model, batch), batch.unseen.hidden)
        except Exception as error:  # the sequence does not depend on it
            if is_failed_command(error) or not is_out_of_memory(error):
                raise
            prefix.clear()
