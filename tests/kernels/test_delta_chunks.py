"""The CUDA kernels of a prompt's gated delta rule, run on the CPU: what they compute, and on what its bits depend."""

from collections.abc import Iterator
from itertools import pairwise

import cuda_on_cpu
import mlx.core as mx
import numpy as np
import pytest
from backends import SLOW, exact, same
from test_gated_delta import Run, Sizes, in_float64, net, part

from headstart.kernels import Backend
from headstart.kernels.cuda import delta_chunks
from headstart.kernels.cuda.delta_chunks import (
    CHUNK,
    chunk_bytes,
    delta_chunks_fit,
    launch_delta_chunks,
    triangle_bytes,
)
from headstart.kernels.types import GatedDeltaWeights, Ran, Window
from headstart.state import Recurrent

SIZES = Sizes(1, 2, 64, 64)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[pytest.MonkeyPatch]:
    with cuda_on_cpu.emulated() as patch:
        patch.setattr(delta_chunks, "multiprocessors", lambda: 0)  # blocks of four warps
        yield patch


def layer(sizes: Sizes = SIZES, dtype: str = "bfloat16", decay: float | None = None) -> Run:
    """A layer whose decays are of all sizes, or, for a typical token, exp(-decay)."""
    run = Run(Backend(), sizes, dtype)
    if decay is not None:
        run.net = net.__wrapped__(sizes, dtype)
        run.net.A_log = mx.full(sizes.hv, np.log(decay / 0.7))
    return run


def launch(run: Run, text: Window, memory: Recurrent) -> Ran:
    return launch_delta_chunks(text, GatedDeltaWeights.of(run.net), memory.state, memory.conv)


def distance(found: mx.array, expected: np.ndarray) -> float:
    return float(np.linalg.norm(exact(found) - expected) / np.linalg.norm(expected))


def assert_float64(run: Run, text: Window, allowed: float) -> None:
    """Allow as much of the state, and twice as much of the outputs."""
    memory = run.memory()
    found = launch(run, text, memory)
    expected, state = in_float64(run.net, text, memory)
    assert distance(found.state[0], state) < allowed
    assert distance(found.y[0], expected) < 2 * allowed
    assert mx.array_equal(found.conv, mx.concatenate([memory.conv, text.qkv], axis=1)[:, -3:])
    assert found.drafts is None


def with_gates(text: Window, beta: float) -> Window:
    """The text with a bias of what beta is the sigmoid of."""
    return text._replace(b=(text.b + beta).astype(text.b.dtype))


def with_equal_keys(text: Window, sizes: Sizes = SIZES) -> Window:
    """The text with the first token's queries and keys in all of them."""
    shared = 2 * sizes.hk * sizes.dk
    first = mx.broadcast_to(text.qkv[:, :1, :shared], (*text.qkv.shape[:2], shared))
    return text._replace(qkv=mx.concatenate([first, text.qkv[..., shared:]], axis=2))


@pytest.mark.parametrize(
    ("sizes", "dtype", "width", "allowed"),
    [
        (SIZES, "bfloat16", 3 * CHUNK + 20, 3e-3),
        pytest.param(SIZES, "float16", 3 * CHUNK + 20, 5e-4, marks=SLOW),
        pytest.param(Sizes(1, 1, 128, 128), "bfloat16", 5 * CHUNK, 3e-3, marks=SLOW),
        pytest.param(Sizes(2, 2, 128, 128), "float16", 3 * CHUNK - 1, 5e-4, marks=SLOW),
        pytest.param(SIZES, "bfloat16", 2048, 3e-3, marks=SLOW),
    ],
)
def test_a_pass_gets_what_its_tokens_are_in_float64(sizes: Sizes, dtype: str, width: int, allowed: float) -> None:
    run = layer(sizes, dtype)
    assert_float64(run, run.text(width), allowed)


@pytest.mark.parametrize("decay", [1e-4, 0.05, 20.0])
@pytest.mark.parametrize("beta", [-6.0, 1.0, 6.0])
def test_decays_and_gates_of_all_sizes(decay: float, beta: float) -> None:
    run = layer(decay=decay)
    assert_float64(run, with_gates(run.text(3 * CHUNK), beta), 4e-3)


@pytest.mark.parametrize("decay", [1e-4, 0.05])
@pytest.mark.parametrize("beta", [1.0, 6.0])
def test_equal_keys_whose_values_all_but_cancel(decay: float, beta: float) -> None:
    run = layer(decay=decay)
    assert_float64(run, with_equal_keys(with_gates(run.text(3 * CHUNK), beta)), 4e-3)


def test_a_prompt_cut_at_chunks_has_the_bits_of_the_whole() -> None:
    run, width = layer(), 3 * CHUNK + 30
    text, memory = run.text(width), run.memory()
    whole = launch(run, text, memory)
    for cuts in ([0, CHUNK, width], [0, 2 * CHUNK, 3 * CHUNK, width]):
        state, conv, outputs = memory.state, memory.conv, []
        for start, stop in pairwise(cuts):
            y, state, conv, _ = launch(run, part(text, start, stop), Recurrent(state, conv))
            outputs.append(y)
        assert same((mx.concatenate(outputs, axis=1), whole.y), (state, whole.state), (conv, whole.conv))


@pytest.mark.parametrize("count", [1, 2, 40, CHUNK + 17])
def test_a_token_has_the_same_bits_in_a_pass_of_any_width(count: int) -> None:
    """However large the tokens after it are."""
    run, width = layer(), CHUNK + 40
    text, memory = run.text(width), run.memory()
    first = launch(run, part(text, 0, count), memory)
    later = mx.arange(width) >= count
    larger = [mx.where(later.reshape(-1, *[1] * (a.ndim - 2)), 100 * a, a).astype(a.dtype) for a in text]
    together, changed = launch(run, text, memory), launch(run, Window(*larger), memory)
    assert same((first.y, together.y[:, :count]), (first.y, changed.y[:, :count]))
    assert not same((together.y, changed.y))
    assert same((first.conv, mx.concatenate([memory.conv, text.qkv[:, :count]], axis=1)[:, -3:]))


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    run = layer()
    text, crowd = run.text(CHUNK + 5, 3), run.memory(3)
    y, state, conv, _ = launch(run, text, crowd)
    for row in range(3):
        only = slice(row, row + 1)
        alone = launch(run, part(text, 0, CHUNK + 5, only), run.memory())
        assert same((alone.y, y[only]), (alone.state, state[only]), (alone.conv, conv[only]))


@SLOW
def test_blocks_of_two_warps_give_the_same_bits(kernels: pytest.MonkeyPatch) -> None:
    run = layer()
    text, memory = run.text(CHUNK + 5), run.memory()
    expected = launch(run, text, memory)
    with kernels.context() as patch:
        patch.setattr(delta_chunks, "multiprocessors", lambda: 100)
        found = launch(run, text, memory)
    assert same((found.y, expected.y), (found.state, expected.state))


def test_what_does_not_fit_is_left_to_other_kernels(kernels: pytest.MonkeyPatch) -> None:
    card = {75: 9, 97: 232448}
    with kernels.context() as patch:
        patch.setattr(delta_chunks, "device_attribute", card.get)

        def fits(dk: int = 128, dv: int = 128, taps: int = 4, dtype: mx.Dtype = mx.bfloat16) -> bool:
            return delta_chunks_fit(mx.zeros((1, 2, dv, dk)), dtype, taps)

        assert all((fits(), fits(64, 64), fits(dtype=mx.float16)))
        assert not any((fits(dv=64), fits(256, 256), fits(taps=9), fits(dtype=mx.float32)))
        card[97] = 99 * 1024  # consumer cards
        assert fits()
        card[97] = 64 * 1024
        assert (fits(), fits(64, 64)) == (False, True)
        card[75] = 7
        assert not fits(64, 64)


@pytest.mark.parametrize("D", [64, 128])
def test_blocks_leave_room_for_as_many_as_their_registers_do(D: int) -> None:
    """Four triangles on a multiprocessor of 227 KB, each with 1 KB that CUDA takes; a recurrence in 99 KB."""
    assert 4 * (triangle_bytes(D) + 1024) <= 227 * 1024
    assert chunk_bytes(D) <= 99 * 1024
