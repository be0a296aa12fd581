"""A cache whose entries stand for several tokens: its room, its place in a pass, its pieces in the prefix cache."""

import mlx.core as mx
import pytest

from headstart.models.memory import Footprint
from headstart.state import BLOCK, KV, BatchState
from headstart.state.snapshot import Snapshot, cut_kv, restore

EVERY, D = 4, 8


def filled(length: int) -> BatchState:
    """The state of a sequence of so many tokens: one cache of them, and one of their entries."""
    tokens, entries = (KV.empty(1, 1, D, mx.float32, every=every) for every in (1, EVERY))
    state = BatchState.empty([tokens, entries], 1)
    state.reserve(length)
    for layer in (tokens, entries):
        count = length // layer.every
        numbers = mx.arange(count * D, dtype=mx.float32).reshape(1, 1, count, D) + 1
        layer.write(numbers, -numbers)
    state.commit(mx.array([length]), length)
    return state


def test_room_and_places_are_those_of_tokens() -> None:
    state = filled(22)
    tokens, entries = state.layers
    assert (tokens.capacity, entries.capacity, entries.keys.shape[2]) == (BLOCK, BLOCK, BLOCK // EVERY)
    state.reserve(3)
    assert (entries.offset.tolist(), entries.reach, tokens.reach) == ([5], 16, 64)
    state.bounds = [BLOCK]
    state.reserve(1)
    assert (entries.capacity, entries.keys.shape[2]) == (2 * BLOCK, 2 * BLOCK // EVERY)
    assert not entries.keys[:, :, 5:].any()
    state.join(filled(9))
    assert [layer.keys.shape[:3] for layer in state.layers] == [(2, 1, 2 * BLOCK), (2, 1, 2 * BLOCK // EVERY)]
    state.bounds = [22, 9]
    state.keep([1])
    assert entries.keys.shape[2] == BLOCK // EVERY
    assert mx.array_equal(entries.keys[:, :, :2], filled(9).layers[1].keys[:, :, :2])


@pytest.mark.parametrize("ends", [(8, 20), (7, 22), (3, 6, 13, 22)])
def test_pieces_that_end_within_a_block_make_the_same_cache(ends: tuple[int, ...]) -> None:
    state, after = filled(22), Snapshot(mx.zeros((1, 1, D)), [])
    pieces = [cut_kv([(state, 0)], *pair) for pair in zip((0, *ends), ends, strict=False)]
    layers = [KV.empty(1, 1, D, mx.float32, every=every) for every in (1, EVERY)]
    again = BatchState.empty(list(layers), 1)
    restore(pieces, after, [(again, 0)], ends[-1])
    for mine, theirs in zip(layers, state.layers, strict=True):
        count = ends[-1] // mine.every
        assert mine.capacity == BLOCK
        assert mx.array_equal(mine.keys[:, :, :count], theirs.keys[:, :, :count])
        assert not mine.keys[:, :, count:].any()


def test_an_entry_counts_by_its_tokens_in_the_memory_of_a_sequence() -> None:
    footprint = Footprint(fixed=0, position=D * 4 * 2 + D * 4 * 2 // EVERY)
    state = filled(22)
    assert footprint.bytes([22]) == sum(array.nbytes for layer in state.layers for array in layer.arrays())
