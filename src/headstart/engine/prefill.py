"""Prefill a prompt in passes, starting after the longest prefix that the prefix cache holds.

A sequence that is recomputed has tokens of its own after the prompt. Where prompts have the bits of decoding they are
read with it; elsewhere they go through the kernels that made them, in windows.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import islice

import mlx.core as mx

from ..kernels import Backend
from ..models import Model
from ..state import Chunks, PrefixCache, UnseenPairs
from ..state.snapshot import States, take_snapshot
from .batch import Batch
from .device_error import is_failed_command, is_out_of_memory
from .invariance import is_batch_invariant
from .prompt_pass import PromptPass
from .sequence import SequenceState
from .step import prefill, prefill_by_layers
from .turns import TurnMarker, chunk_ends


def start_prefill(
    model: Model, sequence: SequenceState, prefix: PrefixCache | None, marker: TurnMarker | None, *, narrowed: bool
) -> None:
    """Make the sequence's own batch, with what the prefix cache holds of its tokens. `narrowed`: passes are not as
    wide as those that it may hold."""
    generated, stats, cut = sequence.num_generated, sequence.stats, model.reading.backend.cut
    sequence.prompt_end = len(sequence.tokens) - 1 - (0 if cut == 1 else generated)
    prompt = sequence.tokens[: sequence.prompt_end + 1]
    ends = chunk_ends(prompt, marker, model.reading.backend.chunk, cut or 1)
    if sequence.images is not None:
        ends = sequence.images.whole_chunks(ends)
    sequence.chunks = Chunks.of(sequence.cache_keys[: len(prompt)], ends, sequence.handle.request.adapter)
    batch = Batch.of_one(model, sequence.tokens, sequence.params, sequence.limits.most, generated, stats.rounds)
    sequence.batch = batch
    if (adapter := sequence.handle.request.adapter) is not None:
        batch.trunk_state.adapt([model.adapters[adapter].index])
    sequence.started = sequence.started or time.perf_counter()
    exact = is_batch_invariant(model) and sequence.params.params.rule != "optimistic" and not model.eight_bit_kv
    if prefix is not None:
        sequence.num_prefilled = resume_prefix(model, batch, sequence.tokens, sequence.chunks, prefix)
        sequence.apart = prefix.fork(sequence.chunks)
        exact = exact and not (sequence.num_prefilled and prefix.eight_bits)
    if narrowed and cut is None and (sequence.num_prefilled or generated):  # it was read in other passes
        exact = False
    if not generated:
        stats.prefix_cache_hit = sequence.num_prefilled
        stats.exact = exact
    stats.exact = stats.exact and exact


def open_pass(
    model: Model, sequence: SequenceState, prefix: PrefixCache | None, widest: int, *, whole: bool
) -> PromptPass | None:
    """Describe the beginning of a pass over up to `widest` tokens, of which nothing runs yet; None while an image is
    in the tower. `whole`: it has a single piece."""
    assert sequence.batch is not None
    done, end, keep = sequence.num_prefilled, len(sequence.tokens) - 1, None
    if done < sequence.prompt_end:
        end, keep = pass_end(sequence, done, widest, model.reading.backend)
    end = min(end, done + widest)
    if sequence.images is not None:
        end = sequence.images.whole(done, end)
        keep = None if keep is not None and keep >= end else keep
        if not sequence.images.advance(model, done, end):
            return None
    if done:  # wait for the pass before: progress is real, memory bounded, and a cancelled request stops soon
        mx.eval(sequence.batch.arrays())
        _store(model, sequence, prefix)
        if not sequence.num_generated and done > sequence.num_reported:  # not again if it is recomputed
            sequence.num_reported = done
            sequence.put(prompt_processed=done)
    again = done >= sequence.prompt_end
    steps = _decode_again(model, sequence, done, end) if again else _read(model, sequence, done, end, keep)
    pieces = -(-(end - done) // model.known_window) if again else max(len(model.layers), 1)
    pieces = 1 if whole or end == done else pieces
    return PromptPass(done, end, pieces, steps, left=pieces)


def run_pass(
    model: Model, sequence: SequenceState, prefix: PrefixCache | None, reading: PromptPass, pieces: int
) -> bool:
    """Launch some pieces of a pass. Return True once all tokens but the last are in: that one opens the first
    window."""
    assert sequence.batch is not None
    if not reading.running:
        reading.launched = time.perf_counter()
    reading.left, reading.running = reading.left - pieces, reading.running + pieces
    steps = islice(reading.steps, pieces) if reading.left else reading.steps
    reading.made = launch_steps(steps, model.reading.backend.layers_ahead)
    kept = [] if sequence.kept is None else sequence.kept[1].arrays()
    mx.async_eval(reading.made, sequence.batch.arrays(), kept)
    if reading.left:
        return False
    sequence.num_prefilled = reading.end
    if reading.end < len(sequence.tokens) - 1:
        return False
    _store(model, sequence, prefix)
    if sequence.images is not None:
        sequence.images.finish(sequence.batch)
    return True


def launch_steps(steps: Iterator[mx.array], ahead: int | None) -> list[mx.array]:
    """Describe the steps of a pass and return what the last of them gives, launching some `ahead` at a time."""
    if ahead is None:
        return list(deque(steps, maxlen=1))
    made: list[mx.array] = []
    while some := list(deque(islice(steps, ahead), maxlen=1)):
        mx.async_eval(some)
        mx.eval(made)
        made = some
    return made


def _read(
    model: Model, sequence: SequenceState, begin: int, end: int, keep: int | None
) -> Generator[mx.array, None, None]:
    """Run the layers of what reads prompts over the tokens from `begin` to `end`."""
    assert sequence.batch is not None
    if begin == end:
        return
    tokens, images, embeddings = sequence.tokens, sequence.images, None
    given = tokens[begin:end]
    if images is not None:
        images.place(sequence.batch, begin, end)
        embeddings = images.embed(model, tokens, begin, end, back=model.head_modules - 1 if model.has_head else 0)
        given = images.looked_up(tokens, begin, end)
    read, following = mx.array([given], mx.int32), mx.array([tokens[end]], mx.int32)
    kept = yield from prefill_by_layers(
        model.reading, sequence.batch, read, following, embeddings, keep and keep - begin
    )
    sequence.kept = None if keep is None or kept is None else (keep, kept)


def _decode_again(model: Model, sequence: SequenceState, begin: int, end: int) -> Generator[mx.array, None, None]:
    """Run windows of known tokens through the layers that generated them."""
    assert sequence.batch is not None
    for start in range(begin, end, model.known_window):
        stop = min(start + model.known_window, end)
        read = mx.array([sequence.tokens[start:stop]], mx.int32)
        prefill(model, sequence.batch, read, mx.array([sequence.tokens[stop]], mx.int32))
        yield sequence.batch.trunk_state.lengths


def pass_end(sequence: SequenceState, done: int, widest: int, reader: Backend) -> tuple[int, int | None]:
    """Return where a pass of at most `widest` tokens after the first `done` of a prompt ends, and the end of a chunk
    within it where the state is to be kept.

    A device that cannot keep it there stops at each. One that can goes on to the prompt's end, or to the last end of
    a chunk that is in reach; it stops where prompts have gone apart, so that the next one resumes there.
    """
    assert sequence.chunks is not None
    last = sequence.prompt_end
    furthest = min(done + widest, last)
    within = [end for end in sequence.chunks.ends if done < end <= furthest]
    if within and not reader.keeps:
        return within[0], None
    if done < sequence.apart <= furthest:
        return sequence.apart, None
    if furthest < last and within:
        return within[-1], None
    if furthest < last and reader.cut is not None:
        return max(furthest - furthest % reader.cut, min(done + reader.cut, last)), None
    return furthest, within[-1] if within and within[-1] < last else None


def _states(model: Model, batch: Batch) -> States:
    head = [(batch.head_state, model.head_modules)] if batch.head_state is not None else []
    return [(batch.trunk_state, 0), *head]


def resume_prefix(model: Model, batch: Batch, tokens: Sequence[int], chunks: Chunks, prefix: PrefixCache) -> int:
    """Load the longest cached prefix of `tokens` into the batch, and return its length.

    A sequence that does not draft gets a head state all the same, so that every entry serves every sequence.
    """
    if model.drafts_from_pairs and batch.head_state is None:
        batch.head_state = model.make_head_state(1)
    if (found := prefix.resume(chunks, _states(model, batch))) is None:
        return 0
    length, hidden = found
    if batch.head_state is not None:  # the last hidden state pairs with this sequence's own next token
        first = length + 1 - hidden.shape[1]
        following = mx.array([tokens[first : length + 1]], mx.int32)
        batch.unseen = UnseenPairs(hidden, following, mx.array([hidden.shape[1]], mx.int32))
    return length


def _store(model: Model, sequence: SequenceState, prefix: PrefixCache | None) -> None:
    """Add to the prefix cache what the last pass over the prompt has left, or kept, at the end of a chunk."""
    assert sequence.batch is not None
    assert sequence.chunks is not None
    if prefix is None:
        return
    batch, chunks = sequence.batch, sequence.chunks
    end, after = sequence.kept or (sequence.num_prefilled, None)
    sequence.kept = None
    if end not in chunks.ends:
        return
    mx.eval(batch.arrays())
    after = after or take_snapshot(batch.trunk_state, batch.unseen.hidden)
    try:
        prefix.store(chunks, chunks.ends.index(end) + 1, _states(model, batch), after)
    except Exception as error:  # the sequence does not depend on it
        if is_failed_command(error) or not is_out_of_memory(error):
            raise
        prefix.clear()
