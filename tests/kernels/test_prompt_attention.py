"""The CUDA kernel of prompts' attention, run on the CPU: what it computes, and that queries are independent."""

from collections.abc import Iterator
from itertools import pairwise

import cuda_on_cpu
import mlx.core as mx
import numpy as np
import pytest
from backends import exact, normal

from headstart.kernels.cuda import prompt_attention
from headstart.kernels.cuda.prompt_attention import KEYS, ROWS, launch_prompt_attention

H, HKV = 6, 2
SCALE = 0.2
PIECE = 2 * KEYS
SLOW = pytest.mark.slow


@pytest.fixture(
    autouse=True, scope="module", params=[True, pytest.param(False, marks=SLOW)], ids=["warpgroups", "warps"]
)
def kernels(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    with cuda_on_cpu.emulated() as patch:
        patch.setattr(prompt_attention, "multiplies_in_warpgroups", lambda: request.param)
        patch.setattr(prompt_attention, "multiprocessors", lambda: 1)  # pieces one after the other
        patch.setattr(prompt_attention, "PIECE", PIECE)
        yield patch


def attend(
    queries: mx.array,
    gates: mx.array | None,
    keys: mx.array,
    values: mx.array,
    offset: mx.array,
    window: int | None = None,
) -> mx.array:
    return launch_prompt_attention(queries, gates, keys, values, offset, SCALE, keys.shape[2], window)


def prompts(
    offsets: list[int], width: int, capacity: int, D: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> list[mx.array]:
    """Queries, gates, keys, values and offsets; beyond what a row has written there is no number."""
    rows = len(offsets)
    written = mx.array(offsets)[:, None, None, None] + width > mx.arange(capacity)[None, None, :, None]
    keys, values = (
        mx.where(written, normal(rows, HKV, capacity, D, seed=s, dtype=mx.float32), mx.nan) for s in (1, 2)
    )
    queries, gates = normal(rows, H, width, D, seed=3), normal(rows, width, H * 2 * D, seed=4)
    return [*(a.astype(dtype) for a in (2 * queries, gates, keys, values)), mx.array(offsets, mx.int32)]


def in_float64(
    queries: mx.array, gates: mx.array, keys: mx.array, values: mx.array, offset: mx.array, window: int | None = None
) -> np.ndarray:
    B, H, W, D = queries.shape
    keys, values = (np.repeat(np.nan_to_num(exact(a)), H // HKV, axis=1) for a in (keys, values))
    scores = SCALE * exact(queries) @ keys.swapaxes(2, 3)
    before = (np.array(offset)[:, None] + np.arange(W))[:, None, :, None] - np.arange(keys.shape[2])
    p = np.exp(np.where((before >= 0) & (before < (window or np.inf)), scores, -np.inf))
    out = (p / p.sum(-1, keepdims=True)) @ values
    gates = exact(gates).reshape(B, W, H, 2 * D)[..., D:]
    return (out.transpose(0, 2, 1, 3) / (1 + np.exp(-gates))).reshape(B, W, H * D)


# p is rounded to the type of the values, as in any tensor-core attention, and so is the output.
@pytest.mark.parametrize(
    ("D", "dtype", "allowed"),
    [
        (64, mx.bfloat16, 5e-3),
        pytest.param(64, mx.float16, 6e-4, marks=SLOW),
        (96, mx.bfloat16, 5e-3),
        *(pytest.param(D, mx.bfloat16, 5e-3, marks=SLOW) for D in (128, 192)),
        (256, mx.bfloat16, 5e-3),
    ],
)
def test_a_pass_gets_what_its_softmax_is_in_float64(D: int, dtype: mx.Dtype, allowed: float) -> None:
    inputs = prompts([KEYS - 5, 2 * KEYS], 11, 3 * KEYS, D, dtype)
    found, expected = exact(attend(*inputs)), in_float64(*inputs)
    for row in range(2):
        assert np.linalg.norm(found[row] - expected[row]) < allowed * np.linalg.norm(expected[row])


@pytest.mark.parametrize("offset", [0, KEYS + 30])
def test_passes_of_several_tiles_of_queries(offset: int) -> None:
    inputs = prompts([offset], 2 * ROWS // 3 + 5, 3 * KEYS)
    expected = in_float64(*inputs)
    found = exact(attend(*inputs))
    assert np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)
    queries, gates, *rest = inputs
    found = exact(attend(queries, None, *rest))
    expected = in_float64(queries, mx.full(gates.shape, 1e9), *rest)
    assert np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("window", [20, KEYS + 3])
def test_a_query_sees_a_window_of_positions(window: int) -> None:
    inputs = prompts([0, 2 * KEYS + 7], ROWS // 3 + 5, 4 * KEYS)
    found, expected = exact(attend(*inputs, window)), in_float64(*inputs, window)
    assert np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("begin", [0, KEYS - 7])
def test_a_query_has_the_same_bits_in_a_pass_of_any_width_and_capacity(begin: int, window: int | None) -> None:
    width, capacity = ROWS // 3 + 30, 3 * KEYS
    queries, gates, keys, values, offset = prompts([begin], width, capacity)
    together = attend(queries, gates, keys, values, offset, window)
    for cuts in ([0, 1, 2, 64, width], [0, 43, width], [0, width - 5, width]):
        for start, stop in pairwise(cuts):
            own = slice(start, stop)
            later = mx.arange(capacity)[:, None] >= offset + stop  # not written yet when it is a pass of its own
            alone = [mx.where(later, mx.nan, a).astype(a.dtype) for a in (keys, values)]
            alone = [mx.pad(a, [(0, 0), (0, 0), (0, stop), (0, 0)]) for a in alone]
            found = attend(queries[:, :, own], gates[:, own], *alone, offset + start, window)
            assert mx.array_equal(found, together[:, own])


@pytest.mark.parametrize("window", [None, KEYS + 3])
def test_pieces_side_by_side_give_the_same_bits(window: int | None, kernels: pytest.MonkeyPatch) -> None:
    """One query of the tile with the first piece, some with the second, and a row in the fourth."""
    inputs = prompts([PIECE - 1, 3 * PIECE + 9], 50, 4 * PIECE)
    expected = attend(*inputs, window)
    assert np.linalg.norm(exact(expected) - in_float64(*inputs, window)) < 5e-3 * np.linalg.norm(exact(expected))
    with kernels.context() as patch:
        patch.setattr(prompt_attention, "multiprocessors", lambda: 100)
        assert mx.array_equal(attend(*inputs, window), expected)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    inputs = prompts([7, 2 * KEYS - 2, KEYS], 10, 3 * KEYS)
    crowd = attend(*inputs)
    for row in range(3):
        only = slice(row, row + 1)
        assert mx.array_equal(attend(*[a[only] for a in inputs]), crowd[only])


def test_what_a_query_does_not_see_changes_nothing() -> None:
    """Also where a neighbour in its tile sees it, and however large it is."""
    queries, gates, keys, values, offset = prompts([KEYS - 4], 20, 3 * KEYS)
    together = attend(queries, gates, keys, values, offset)
    later = mx.arange(3 * KEYS)[:, None] >= KEYS
    changed = [mx.where(later, 100 * a, a) for a in (keys, values)]
    found = attend(queries, gates, *changed, offset)
    assert mx.array_equal(found[:, :4], together[:, :4])
    assert not mx.array_equal(found[:, 4:5], together[:, 4:5])
