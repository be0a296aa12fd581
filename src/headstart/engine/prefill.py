"""Prefill a prompt in chunks, starting after the longest prefix that the prefix cache holds."""

import time
from collections.abc import Sequence

import mlx.core as mx

from ..kernels import metal
from ..kernels.cuda import on_cuda
from ..models import Model
from ..state import CHUNK, PrefixCache
from .batch import Batch, UnseenPairs
from .invariance import is_batch_invariant
from .memory import is_out_of_memory
from .request import Event
from .sequence import SequenceState
from .step import prefill


def prefill_chunk(model: Model, sequence: SequenceState, prefix: PrefixCache | None) -> bool:
    """Prefill one more chunk. Return True once all tokens but the last are in: that one opens the first window."""
    tokens = sequence.tokens
    if sequence.batch is None:
        _start(model, sequence, prefix)
    assert sequence.batch is not None
    done, images = sequence.num_prefilled, sequence.images
    end = min((done // CHUNK + 1) * CHUNK, len(tokens) - 1)
    if images is not None and not images.advance(done, end):
        return False
    if done:  # wait for the chunk before: progress is real, memory bounded, and a cancelled request stops soon
        mx.eval(sequence.batch.arrays())
        if prefix is not None:
            _store(sequence.batch, sequence.cache_keys, done, prefix)
        if not sequence.num_generated and done > sequence.num_reported:  # not again if it is recomputed
            sequence.num_reported = done
            sequence.put(Event(prompt_processed=done))
    if end > done:
        chunk = mx.array([tokens[done:end]], mx.int32)
        embeddings = None
        if images is not None:
            images.place(sequence.batch, done, end)
            embeddings = images.embed(model, tokens, done, end)
        prefill(model, sequence.batch, chunk, mx.array([tokens[end]], mx.int32), embeddings)
        mx.async_eval(sequence.batch.arrays())
        sequence.num_prefilled = end
    if end < len(tokens) - 1:
        return False
    if prefix is not None:
        _store(sequence.batch, sequence.cache_keys, end, prefix)
    if images is not None:
        images.finish(sequence.batch)
    return True


def _start(model: Model, sequence: SequenceState, prefix: PrefixCache | None) -> None:
    """Make the sequence's own batch, with what the prefix cache holds of its tokens."""
    generated, stats = sequence.num_generated, sequence.stats
    batch = Batch.of_one(model, sequence.tokens, sequence.params, sequence.max_k, generated, stats.rounds)
    sequence.batch = batch
    sequence.started = sequence.started or time.perf_counter()
    exact = is_batch_invariant(model) and sequence.params.params.rule != "optimistic"
    if generated and (on_cuda() or metal.on_metal()):  # they are recomputed as a prompt, by other kernels
        exact = False
    if prefix is not None:
        sequence.num_prefilled = _resume(model, batch, sequence, prefix)
        exact = exact and not (sequence.num_prefilled and prefix.eight_bits)
    if not generated:
        stats.prefix_cache_hit = sequence.num_prefilled
        stats.exact = exact
    stats.exact = stats.exact and exact


def _resume(model: Model, batch: Batch, sequence: SequenceState, prefix: PrefixCache) -> int:
    """Load the longest cached prefix of the sequence's tokens into the batch, and return its length.

    A sequence that does not draft gets a head state all the same, so that every entry serves every sequence.
    """
    if model.has_head and batch.head_state is None:
        batch.head_state = model.make_head_state(1)
    if (found := prefix.resume(sequence.cache_keys, batch.trunk_state, batch.head_state)) is None:
        return 0
    length, hidden = found
    if batch.head_state is not None:  # the last hidden state pairs with this sequence's own next token
        following = mx.array([sequence.tokens[length : length + 1]], mx.int32)
        batch.unseen = UnseenPairs(hidden, following, mx.ones((1,), mx.int32))
    return length


def _store(batch: Batch, tokens: Sequence[int], length: int, prefix: PrefixCache) -> None:
    """Add the first `length` tokens to the prefix cache, if that is a multiple of its chunk."""
    if length and length % prefix.chunk == 0:
        mx.eval(batch.arrays())
        try:
            prefix.store(tokens, length, batch.trunk_state, batch.head_state, batch.unseen.hidden)
        except Exception as error:  # the sequence does not depend on it
            if not is_out_of_memory(error):
                raise
            prefix.clear()
