"""What a token attends to by the scores of an index: each row by itself, and among equals the earliest."""

import mlx.core as mx
import numpy as np
import pytest

from headstart.kernels.selection import block_means, relu_scores, select_best, select_tokens
from headstart.state import KV


def best(scores: np.ndarray, visible: np.ndarray, count: int) -> np.ndarray:
    order = sorted(np.flatnonzero(visible), key=lambda n: (-scores[n], n))
    return np.isin(np.arange(len(scores)), order[:count])


@pytest.mark.parametrize("count", [1, 4, 11, 40])
def test_the_best_are_selected_and_among_equals_the_earliest(count: int) -> None:
    rng = np.random.default_rng(count)
    scores = rng.integers(-2, 4, (3, 5, 23)).astype(np.float32)  # nearly all are equal to others
    visible = rng.random((3, 5, 23)) < 0.7
    found = np.array(select_best(mx.array(scores), mx.array(visible), count))
    for row in np.ndindex(3, 5):
        assert (found[row] == best(scores[row], visible[row], count)).all()


@pytest.mark.parametrize(("size", "budget", "reach"), [(4, 8, 64), (4, 32, 61), (1, 5, 64)])
def test_a_block_counts_once_none_of_its_tokens_is_later(size: int, budget: int, reach: int) -> None:
    rng, positions = np.random.default_rng(size), np.array([[0, 1, 2, 3], [7, 8, 9, 10], [40, 41, 42, 43]])
    scores = rng.integers(0, 3, (3, 4, reach // size)).astype(np.float32)
    found = np.array(select_tokens(mx.array(scores), mx.array(positions), size, budget, reach))
    for row in np.ndindex(3, 4):
        whole = (positions[row] + 1) // size
        blocks = best(scores[row], np.arange(reach // size) < whole, budget // size)
        expected = [t <= positions[row] and bool(t >= whole * size or blocks[t // size]) for t in range(reach)]
        assert found[row].tolist() == expected
        assert found[row].sum() <= budget + size - 1


def test_a_row_selects_the_same_alone_in_a_window_and_whatever_lies_past_it() -> None:
    rng = np.random.default_rng(0)
    queries, keys = rng.standard_normal((2, 6, 3, 16)), rng.standard_normal((2, 64, 16))
    positions = np.array([[40, 41, 42, 43, 44, 45], [9, 10, 11, 12, 13, 14]])

    def tokens(row: int, columns: slice, reach: int) -> np.ndarray:
        held = keys[row : row + 1, :reach].copy()
        held[0, positions[row, columns][-1] + 1 :] = np.nan  # as a rejected draft of a broken model may leave it
        held, asked = (mx.array(a.astype(np.float32)) for a in (held, queries[row : row + 1, columns]))
        scores = relu_scores(asked, block_means(held, 4))
        return np.array(select_tokens(scores, mx.array(positions[row : row + 1, columns]), 4, 8, reach))[0]

    for row in range(2):
        whole = tokens(row, slice(None), 64)
        for at in range(6):
            assert (tokens(row, slice(at, at + 1), 52)[0] == whole[at, :52]).all()
            assert not whole[at, 52:].any()


def test_the_index_of_a_cache_is_written_grown_kept_and_joined_with_it() -> None:
    def cache(rows: int, seed: int) -> KV:
        memory = KV.empty(rows, 2, 32, mx.float32, eight_bits=seed == 2, index=[(8, mx.float32), (3, mx.int32)])
        memory.grow(4)
        memory.reach = 4
        return memory

    for seed in (1, 2):
        first, second = cache(2, seed), cache(1, seed)
        first.offset = mx.array([0, 2])
        keys, numbers = mx.random.normal((2, 1, 2, 8)), mx.arange(12).reshape(2, 1, 2, 3).astype(mx.int32)
        read = first.update_index([keys, numbers])
        assert mx.array_equal(read[0][1, :, 2:4], keys[1])
        assert mx.array_equal(read[1][0, :, :2], numbers[0])
        first.join(second)
        first.keep(mx.array([2, 0]), 3)
        assert [a.shape[:3] for a in first.index] == [(2, 1, 3)] * 2
        assert mx.array_equal(first.index[0][1, :, :2], keys[0])
        again = KV.of(first.arrays())
        assert [len(again.scales), len(again.index)] == [len(first.scales), 2]
        assert again.replace([*again.arrays(), keys]) == [keys]
