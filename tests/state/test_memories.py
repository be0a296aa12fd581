"""The state of a layer by itself: how it begins, grows, loses and gains sequences, and is split."""

import mlx.core as mx
import pytest

from headstart.kernels.recurrent import conv_history
from headstart.state import KV, Recurrent

H, D = 2, 4  # heads of keys and values, and their size
TYPE = mx.bfloat16  # as models have it; what is kept in float32 must stay so


def numbers(*shape: int, dtype: mx.Dtype = TYPE, seed: int = 0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape) + 100 * seed)).astype(dtype)


def kv(rows: int, capacity: int) -> KV:
    keys, values = (numbers(rows, H, capacity, D, seed=seed) for seed in (0, 1))
    return KV(keys, values, mx.arange(1, rows + 1))


def recurrent(rows: int, drafts: int | None) -> Recurrent:
    memory = Recurrent(numbers(rows, 2, 5, 4, dtype=mx.float32), numbers(rows, 4, 6))
    if drafts is not None:
        shapes = [(2, 4), (2, 5), (2,), (2,)]
        rest = [numbers(rows, drafts, *shape, dtype=mx.float32, seed=seed) for seed, shape in enumerate(shapes)]
        memory.pending = [numbers(rows, drafts, 6), *rest]
    return memory


def same(found: list[mx.array], expected: list[mx.array]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and mx.array_equal(a, b) for a, b in pairs)


def test_keys_and_values_begin_without_room() -> None:
    memory = KV.empty(3, H, D, TYPE)
    assert same([*memory.arrays(), memory.offset], [mx.zeros((3, H, 0, D), TYPE)] * 2 + [mx.zeros((3,), mx.int32)])
    assert memory.capacity == 0


@pytest.mark.parametrize("capacity", [3, 5, 6, 9])
def test_new_room_lies_behind_what_there_was(capacity: int) -> None:
    memory, before = kv(3, 5), kv(3, 5)
    memory.grow(capacity)
    assert memory.capacity == max(5, capacity)  # never less
    assert same([a[:, :, :5] for a in memory.arrays()], before.arrays())
    assert not any(a[:, :, 5:].any() for a in memory.arrays())


@pytest.mark.parametrize(("rows", "heads"), [(1, 2), (2, 2), (3, 1)])
def test_a_pass_reads_what_it_wrote_in_the_memorys_own_type(rows: int, heads: int) -> None:
    memory = KV(numbers(rows, heads, 9, D), numbers(rows, heads, 9, D, seed=1), mx.arange(rows), reach=6)
    before = [mx.array(a) for a in memory.arrays()]
    new = [numbers(rows, heads, 3, D, dtype=mx.float32, seed=seed) for seed in (2, 3)]
    read = memory.update_and_fetch(*new)
    assert same(list(read), [a[:, :, :6] for a in memory.arrays()])
    for held, was, written in zip(memory.arrays(), before, new, strict=True):
        for row in range(rows):
            assert same(
                [held[row, :, :row], held[row, :, row : row + 3], held[row, :, row + 3 :]],
                [was[row, :, :row], written[row].astype(TYPE), was[row, :, row + 3 :]],
            )


@pytest.mark.parametrize(("mine", "theirs"), [(5, 9), (9, 5), (5, 5)])
def test_keys_and_values_of_joining_sequences_come_last(mine: int, theirs: int) -> None:
    memory, other = kv(2, mine), kv(1, theirs)
    memory.join(other)
    assert memory.capacity == max(mine, theirs)
    assert same([a[:2, :, :mine] for a in memory.arrays()], kv(2, mine).arrays())
    assert same([a[2:, :, :theirs] for a in memory.arrays()], kv(1, theirs).arrays())
    assert not any(a[:2, :, mine:].any() or a[2:, :, theirs:].any() for a in memory.arrays())
    assert memory.offset.tolist() == [1, 2, 1]


def test_keys_and_values_are_kept_in_the_order_asked_for() -> None:
    memory, rows = kv(3, 5), mx.array([2, 0, 0])
    memory.keep(rows, 4)
    assert same(memory.arrays(), [a[rows][:, :, :4] for a in kv(3, 5).arrays()])
    assert memory.offset.tolist() == [3, 1, 1]


def test_a_recurrent_state_begins_as_zeros_in_float32() -> None:
    memory = Recurrent.empty(3, heads=2, value=5, key=4, kernel=4, channels=6, dtype=TYPE)
    assert same(memory.arrays(), [mx.zeros((3, 2, 5, 4)), mx.zeros((3, 3, 6), TYPE)])


def test_the_convolution_goes_on_behind_the_drafts_that_stand() -> None:
    memory = recurrent(3, drafts=2)
    assert memory.pending is not None
    history = conv_history(memory, mx.array([0, 1, 2]))
    for row, accepted in enumerate([0, 1, 2]):
        inputs = mx.concatenate([memory.conv[row], memory.pending[0][row, :accepted]])
        assert same([history[row]], [inputs[-4:]])
    assert same([conv_history(recurrent(3, None), mx.array([0, 0, 0]))], [memory.conv])


@pytest.mark.parametrize("drafts", [None, 2])
def test_recurrent_states_are_kept_with_their_drafts(drafts: int | None) -> None:
    memory, rows = recurrent(3, drafts), mx.array([2, 0, 0])
    memory.keep(rows)
    assert same(memory.arrays(), [a[rows] for a in recurrent(3, drafts).arrays()])


@pytest.mark.parametrize("drafts", [None, 2])
def test_a_joining_sequence_brings_blanks_for_drafts(drafts: int | None) -> None:
    memory, other = recurrent(3, drafts), recurrent(1, None)
    memory.join(other)
    blanks = [mx.zeros((1, *a.shape[1:]), a.dtype) for a in memory.arrays()[2:]]
    assert same([a[:3] for a in memory.arrays()], recurrent(3, drafts).arrays())
    assert same([a[3:] for a in memory.arrays()], [*other.arrays(), *blanks])


@pytest.mark.parametrize("drafts", [None, 2])
def test_recurrent_states_are_what_their_arrays_are(drafts: int | None) -> None:
    """So a compiled pass can take them apart and put them together."""
    memory = recurrent(3, drafts)
    other = Recurrent.of(memory.arrays())
    assert same([other.state, other.conv], [memory.state, memory.conv])
    assert (other.pending is None) == (drafts is None)
    if other.pending is not None and memory.pending is not None:
        assert same(other.pending, memory.pending)


def test_keys_and_values_are_what_their_arrays_are() -> None:
    memory = kv(3, 5)
    other = KV.of(memory.arrays())
    assert same([other.keys, other.values, other.offset], [memory.keys, memory.values, mx.zeros((3,), mx.int32)])
