"""Room for keys and values: made in blocks before every pass, zero where nothing was written, never overrun."""

import random

import mlx.core as mx
import pytest

import headstart.engine.step as loop
from fixtures import batch_of, mlx_lm_greedy, random_model, random_prompt
from headstart.engine.batch import Batch
from headstart.models import Model
from headstart.state import BLOCK, KV
from headstart.state.kv import _write


def kv_layers(batch: Batch) -> list[KV]:
    memories = [*batch.trunk_state.layers, *(batch.head_state.layers if batch.head_state else [])]
    return [memory for memory in memories if isinstance(memory, KV)]


def say(model: Model, batch: Batch, depths: list[int]) -> tuple[list[list[int]], list[mx.array]]:
    """What the sequences generate in a step for each of the depths, and the logits of those tokens."""
    said: list[list[int]] = [[] for _ in range(batch.size)]
    logits = []
    for k in depths:
        round = loop.step(model, batch, k)
        accepted = round.verdict.accepted.tolist()
        for row, n in enumerate(accepted):
            said[row] += round.verdict.tokens[row, : n + 1].tolist()
            logits.append(round.logits[row, : n + 1])
        assert all(b >= n for b, n in zip(batch.trunk_state.bounds, batch.trunk_state.lengths.tolist(), strict=True))
    return said, logits


def test_a_write_past_the_capacity_would_land_in_the_next_head() -> None:
    """Why `BatchState.reserve` exists: MLX raises nothing."""
    into = mx.zeros((2, 2, 4, 1))
    out = _write(into, mx.ones((2, 2, 2, 1)), mx.array([3, 0]))
    assert out[0, 1, 0].item() == 1.0  # row 0 has overrun its head 0
    assert out[0, 1, 1:3].tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_write_lands_at_each_rows_own_offset_and_nowhere_else(rows: int) -> None:
    into, new = mx.zeros((rows, 2, 8, 4)), mx.random.normal((rows, 2, 3, 4), key=mx.random.key(0))
    offsets = [5, 0, 2][:rows]
    out = _write(into, new, mx.array(offsets))
    for row, offset in enumerate(offsets):
        assert mx.array_equal(out[row, :, offset : offset + 3], new[row])
        assert not out[row, :, :offset].any()
        assert not out[row, :, offset + 3 :].any()


@pytest.mark.parametrize(
    "lengths", [pytest.param((BLOCK - 9, 6, BLOCK + 1), marks=pytest.mark.slow), (BLOCK, BLOCK - 1, 2)]
)
def test_growing_at_a_block_border_changes_nothing(lengths: tuple[int, ...]) -> None:
    """Ragged sequences, so that one of them crosses the border while others are far from it."""
    model, rng = random_model("dense"), random.Random(3)
    prompts = [random_prompt(model, length, seed) for seed, length in enumerate(lengths)]
    depths = [rng.choice([0, 1, 3, 8]) for _ in range(10)]
    small, large = batch_of(model, *prompts), batch_of(model, *prompts)
    start = small.trunk_state.capacity
    for memory in kv_layers(large):
        memory.grow(4 * BLOCK)
    said, logits = say(model, small, depths)
    expected, expected_logits = say(model, large, depths)
    assert said == expected
    assert all(mx.array_equal(a, b) for a, b in zip(logits, expected_logits, strict=True))
    assert start == BLOCK < small.trunk_state.capacity < large.trunk_state.capacity == 4 * BLOCK
    for prompt, tokens in zip(prompts, said, strict=True):
        assert tokens == mlx_lm_greedy(model, prompt, len(tokens))


@pytest.mark.usefixtures("stock_ops")  # they write through `update_and_fetch`
def test_there_is_always_room_for_the_window_in_every_layer() -> None:
    """The bound of a length is never below it, however acceptance goes, and no pass starts without room."""
    model, rng = random_model("dense"), random.Random(4)
    batch = batch_of(model, *[random_prompt(model, BLOCK - 12 + 5 * n, n) for n in range(3)])
    capacity_at_write: list[tuple[int, int]] = []
    write = KV.update_and_fetch

    def checked(self: KV, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        capacity_at_write.append((int(self.offset.max().item()) + keys.shape[2], self.capacity))
        return write(self, keys, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KV, "update_and_fetch", checked)
        say(model, batch, [rng.randint(0, 8) for _ in range(16)])
    assert all(end <= capacity for end, capacity in capacity_at_write)
    assert max(end for end, _ in capacity_at_write) > BLOCK  # a border was crossed


def test_new_room_is_zero() -> None:
    """A masked position still enters P·V as 0·x, and 0·NaN is NaN."""
    model = random_model("dense")
    batch = batch_of(model, random_prompt(model, 4))
    for memory in kv_layers(batch):
        memory.grow(3 * BLOCK)
        assert memory.capacity == 3 * BLOCK
        assert not memory.keys[:, :, BLOCK:].any()
        assert not memory.values[:, :, BLOCK:].any()


@pytest.mark.usefixtures("stock_ops")  # our kernels never read it
def test_room_beyond_a_rows_length_matters_only_if_it_is_not_finite() -> None:
    """What rejected drafts leave is finite, so it does no harm; a NaN there breaks the sequence, and is noticed."""
    model = random_model("dense")
    prompts = [random_prompt(model, 20, seed) for seed in range(2)]
    expected = [mlx_lm_greedy(model, prompt, 4) for prompt in prompts]
    for stale, finite in ((1e9, [True, True]), (float("nan"), [True, False])):
        batch = batch_of(model, *prompts)
        for memory in kv_layers(batch)[:1]:
            memory.values[1, :, 30:] = mx.array(stale)
        round = loop.step(model, batch, 0)
        assert round.verdict.finite.tolist() == finite
        assert round.verdict.tokens[0].tolist() == expected[0][:1]
        if all(finite):
            assert round.verdict.tokens[1].tolist() == expected[1][:1]
