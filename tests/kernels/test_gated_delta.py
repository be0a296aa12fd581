"""The CUDA kernel of the gated delta rule, run on the CPU: what it computes, and on what its bits depend."""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import cuda_on_cpu
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
from operations import run_window

from headstart.kernels import Backend
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.types import PendingDrafts, Window
from headstart.state import Recurrent

HK, HV, DK, DV = 1, 2, 32, 8  # a block is 32 threads


CUDA = CudaBackend()


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated():
        yield


@cache
def net(dtype: mx.Dtype = mx.float32) -> nn.Module:
    mx.random.seed(0)
    layer = GatedDeltaNet(
        TextModelArgs(
            hidden_size=32,
            num_attention_heads=2,
            linear_num_key_heads=HK,
            linear_num_value_heads=HV,
            linear_key_head_dim=DK,
            linear_value_head_dim=DV,
        )
    )
    layer.conv1d.weight = mx.random.normal(layer.conv1d.weight.shape)
    layer.norm.weight = mx.random.uniform(0.5, 1.5, (DV,))
    layer.set_dtype(dtype)
    layer.A_log = layer.A_log.astype(mx.float32)
    return layer


def tokens(count: int, rows: int = 1, seed: int = 0, dtype: mx.Dtype = mx.float32) -> Window:
    """Projections of `count` tokens, another text in every sequence."""
    mx.random.seed(seed)
    channels = net().conv_dim
    shapes = [(rows, count, channels), (rows, count, HV, DV), (rows, count, HV), (rows, count, HV)]
    return Window(*[mx.random.normal(shape).astype(dtype) for shape in shapes])


def part(window: Window, start: int, stop: int, row: slice = slice(None)) -> Window:
    return Window(*[a[row, start:stop] for a in window])


def memory(rows: int = 1, dtype: mx.Dtype = mx.float32) -> Recurrent:
    blank = Recurrent.empty(rows, HV, DV, DK, 4, net().conv_dim, dtype)
    mx.random.seed(7)
    state = mx.random.normal(blank.state.shape[1:])
    conv = mx.random.normal(blank.conv.shape[1:]).astype(dtype)
    return Recurrent(mx.repeat(state[None], rows, 0), mx.repeat(conv[None], rows, 0))


def none_accepted(rows: int = 1) -> mx.array:
    return mx.zeros((rows,), mx.int32)


def one_by_one(text: Window, kept: Recurrent, count: int) -> mx.array:
    """The outputs of `count` tokens, each a window of its own."""
    rows = text.qkv.shape[0]
    ys = [
        run_window(CUDA, net(text.qkv.dtype), part(text, t, t + 1), kept, none_accepted(rows), 1)
        for t in range(count)
    ]
    return mx.concatenate(ys, axis=1)


def drafts_of(kept: Recurrent) -> PendingDrafts:
    """Take the lines of the pending drafts apart."""
    assert kept.pending is not None
    (lines,), channels = kept.pending, net().conv_dim
    parts, at = [], channels * kept.conv.itemsize // 4
    for shape in ((HK, DK), (HV, DV), (HV,), (HV,)):
        size = math.prod(shape)
        parts.append(lines[..., at : at + size].view(mx.float32).reshape(*lines.shape[:2], *shape))
        at += size
    assert lines.shape[2] == -(-at // 4) * 4
    return PendingDrafts(lines.view(kept.conv.dtype)[..., :channels], *parts)


def error(found: mx.array, expected: mx.array) -> float:
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))


# By type, the rounding of inputs between the stock ops; in float32 nothing but the order of sums.
@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [
        (mx.float32, 1e-6),
        pytest.param(mx.float16, 3e-3, marks=pytest.mark.slow),
        pytest.param(mx.bfloat16, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_windows_with_ragged_acceptance_are_what_the_stock_ops_make_of_them(dtype: mx.Dtype, allowed: float) -> None:
    ours, theirs = memory(2, dtype), memory(2, dtype)
    # (width, certain, accepted of the last window's drafts); widths beyond 8 need a second tile
    for seed, (width, certain, accepted) in enumerate(
        [(11, 11, (0, 0)), (4, 1, (0, 0)), (9, 1, (3, 1)), (1, 1, (8, 0)), (12, 2, (0, 0)), (2, 1, (10, 9))]
    ):
        window = tokens(width, 2, seed, dtype)
        found = run_window(CUDA, net(dtype), window, ours, mx.array(accepted, mx.int32), certain)
        expected = run_window(Backend(), net(dtype), window, theirs, mx.array(accepted, mx.int32), certain)
        assert error(found, expected) < allowed
        assert error(ours.state, theirs.state) < allowed
        assert mx.array_equal(ours.conv, theirs.conv)
        assert (ours.pending is None) == (theirs.pending is None)
        if ours.pending is not None and theirs.pending is not None:
            found_drafts, expected_drafts = drafts_of(ours), PendingDrafts(*theirs.pending)
            assert mx.array_equal(found_drafts.qkv, expected_drafts.qkv)
            pairs = zip(found_drafts[1:], expected_drafts[1:], strict=True)
            assert all(error(a, b) < allowed for a, b in pairs)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("width", [2, 4, 9, 17])
def test_a_window_has_the_bits_of_its_tokens_read_one_by_one(width: int, dtype: mx.Dtype) -> None:
    text = tokens(width, dtype=dtype)
    together, alone = memory(dtype=dtype), memory(dtype=dtype)
    y = run_window(CUDA, net(dtype), text, together, none_accepted(), width)
    assert mx.array_equal(y, one_by_one(text, alone, width))
    assert mx.array_equal(together.state, alone.state)
    assert mx.array_equal(together.conv, alone.conv)


@pytest.mark.parametrize("accepted", [(0, 3), (2, 1), (3, 0)])
def test_folded_drafts_leave_the_bits_of_tokens_that_were_never_in_doubt(accepted: Sequence[int]) -> None:
    """A window of one and three drafts, then one whose tokens follow what each row accepted."""
    first, then = tokens(4, 2, seed=1), tokens(3, 2, seed=2)
    speculated = memory(2)
    run_window(CUDA, net(), first, speculated, none_accepted(2), 1)
    y = run_window(CUDA, net(), then, speculated, mx.array(accepted, mx.int32), 1)
    for row, count in enumerate(accepted):
        plain, only = memory(), slice(row, row + 1)
        one_by_one(part(first, 0, 1 + count, only), plain, 1 + count)
        assert mx.array_equal(y[only, :1], one_by_one(part(then, 0, 1, only), plain, 1))
        assert mx.array_equal(speculated.state[only], plain.state)
        assert mx.array_equal(speculated.conv[only], plain.conv)
        assert mx.array_equal(y[only, 1:], one_by_one(part(then, 1, 3, only), plain, 2))


def folds_any_number_of_pending_drafts(drafts: int, backend: Backend = CUDA) -> None:
    """Two windows of 1 + `drafts`: row r accepts r drafts of the first. All must have the bits of single tokens."""
    rows = drafts + 1
    first, then = tokens(rows, rows, seed=1), tokens(rows, rows, seed=2)
    speculated = memory(rows)
    run_window(backend, net(), first, speculated, none_accepted(rows), 1)
    y = run_window(backend, net(), then, speculated, mx.arange(rows, dtype=mx.int32), 1)
    plain, ys, states = memory(rows), [], []
    for t in range(2 * rows):  # of each row: what it accepted, then the second window
        at = [t if t <= row else min(rows + t - row - 1, 2 * rows - 1) for row in range(rows)]
        both = [mx.concatenate(pair, axis=1) for pair in zip(first, then, strict=True)]
        token = Window(*[mx.stack([a[row, i : i + 1] for row, i in enumerate(at)]) for a in both])
        ys.append(run_window(backend, net(), token, plain, none_accepted(rows), 1))
        states.append(plain.state)
    alone = mx.concatenate(ys, axis=1)
    for row in range(rows):
        assert mx.array_equal(y[row], alone[row, row + 1 : row + 1 + rows]), row
        assert mx.array_equal(speculated.state[row], states[row + 1][row]), row


@pytest.mark.slow
def test_any_number_of_fifteen_pending_drafts_is_folded() -> None:
    folds_any_number_of_pending_drafts(15)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    text, crowd = tokens(4, 3), memory(3)
    y = run_window(CUDA, net(), text, crowd, none_accepted(3), 1)
    for row in range(3):
        alone, only = memory(), slice(row, row + 1)
        assert mx.array_equal(run_window(CUDA, net(), part(text, 0, 4, only), alone, none_accepted(), 1), y[only])
        assert mx.array_equal(alone.state, crowd.state[only])
