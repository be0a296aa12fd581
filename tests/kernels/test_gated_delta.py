"""The gated delta rule over a window on every backend: what it computes, and on what its bits depend."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import NAMES, SLOW, choose_kernels, error, exact, normal, run_window
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from headstart.kernels import Backend
from headstart.kernels.types import PendingDrafts, Window
from headstart.state import Recurrent


class Sizes(NamedTuple):
    """Heads of keys and values, and their sizes."""

    hk: int = 1
    hv: int = 2
    dk: int = 32
    dv: int = 8  # a block of CUDA is 32 threads


SMALL, LARGE = Sizes(), Sizes(2, 4, 32, 32)
CASES = [
    *((name, SMALL, "float32") for name in NAMES),
    ("cpu", SMALL, "bfloat16"),
    *(("cpu", LARGE, dtype) for dtype in ("float32", "bfloat16")),
    *(pytest.param(name, SMALL, "bfloat16", marks=SLOW) for name in ("reference", "cuda", "metal")),
    pytest.param("cuda", SMALL, "float16", marks=SLOW),
]
every_case = pytest.mark.parametrize(("backend", "sizes", "dtype"), CASES, indirect=["backend"])
# By type, the rounding of inputs between MLX's operations; in float32 nothing but the order of sums.
ALLOWED = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}


@cache
def net(sizes: Sizes, dtype: str) -> nn.Module:
    layer = GatedDeltaNet(
        TextModelArgs(
            hidden_size=32,
            num_attention_heads=2,
            linear_num_key_heads=sizes.hk,
            linear_num_value_heads=sizes.hv,
            linear_key_head_dim=sizes.dk,
            linear_value_head_dim=sizes.dv,
        )
    )
    layer.conv1d.weight = normal(*layer.conv1d.weight.shape, seed=0, dtype=mx.float32)
    layer.norm.weight = mx.random.uniform(0.5, 1.5, (sizes.dv,), key=mx.random.key(1))
    layer.dt_bias = normal(sizes.hv, seed=2, dtype=mx.float32)
    layer.set_dtype(getattr(mx, dtype))
    layer.A_log = normal(sizes.hv, seed=3, dtype=mx.float32)  # decays of all sizes
    return layer


class Run:
    """A layer of these sizes on a backend, its states, and texts for it."""

    def __init__(self, backend: Backend, sizes: Sizes, dtype: str):
        self.backend, self.sizes, self.dtype = backend, sizes, getattr(mx, dtype)
        self.net = net(sizes, dtype)
        choose_kernels(backend, self.dtype, ["gated delta"], self.net)

    def text(self, count: int, rows: int = 1, seed: int = 0) -> Window:
        """Projections of `count` tokens, another text in every sequence."""
        hv, dv = self.sizes.hv, self.sizes.dv
        shapes = [(self.net.conv_dim,), (hv, dv), (hv,), (hv,)]
        given = enumerate(shapes)
        return Window(*[normal(rows, count, *shape, seed=10 * seed + n, dtype=self.dtype) for n, shape in given])

    def memory(self, rows: int = 1) -> Recurrent:
        _, hv, dk, dv = self.sizes
        blank = Recurrent.empty(rows, hv, dv, dk, 4, self.net.conv_dim, self.dtype)
        state = normal(*blank.state.shape[1:], seed=7, dtype=mx.float32)
        conv = normal(*blank.conv.shape[1:], seed=8, dtype=self.dtype)
        return Recurrent(mx.repeat(state[None], rows, 0), mx.repeat(conv[None], rows, 0))

    def window(self, text: Window, memory: Recurrent, accepted: Sequence[int] = (), certain: int = 1) -> mx.array:
        taken = mx.array(accepted or [0] * text.qkv.shape[0], mx.int32)
        return run_window(self.backend, self.net, text, memory, taken, certain)

    def one_by_one(self, text: Window, memory: Recurrent, count: int) -> mx.array:
        """The outputs of `count` tokens, each a window of its own."""
        return mx.concatenate([self.window(part(text, t, t + 1), memory) for t in range(count)], axis=1)

    def drafts(self, memory: Recurrent) -> PendingDrafts:
        """The pending drafts, in whatever layout the backend keeps them."""
        assert memory.pending is not None
        if len(memory.pending) > 1:
            return PendingDrafts(*memory.pending)
        (lines,), (hk, hv, dk, dv) = memory.pending, self.sizes  # CUDA's: a draft is a line
        parts, at = [], self.net.conv_dim * memory.conv.itemsize // 4
        for shape in ((hk, dk), (hv, dv), (hv,), (hv,)):
            size = math.prod(shape)
            parts.append(lines[..., at : at + size].view(mx.float32).reshape(*lines.shape[:2], *shape))
            at += size
        assert lines.shape[2] == -(-at // 4) * 4
        return PendingDrafts(lines.view(memory.conv.dtype)[..., : self.net.conv_dim], *parts)


def part(text: Window, start: int, stop: int, row: slice = slice(None)) -> Window:
    return Window(*[a[row, start:stop] for a in text])


def in_float64(net: nn.Module, text: Window, memory: Recurrent) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of a sequence, all of it certain, and the state after it."""
    qkv, z, b, a = (exact(array[0]) for array in text)
    Hk, Hv, Dk, Dv = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    inputs, kernel = np.concatenate([exact(memory.conv[0]), qkv]), exact(net.conv1d.weight)[..., 0]
    state, taps, outputs = exact(memory.state[0]), kernel.shape[1], []
    for t in range(len(qkv)):
        mixed = (inputs[t : t + taps] * kernel.T).sum(0)
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = np.split(mixed, [Hk * Dk, 2 * Hk * Dk])
        q, k = (np.repeat(x.reshape(Hk, Dk), Hv // Hk, axis=0) for x in (q, k))
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        g = np.exp(-np.exp(exact(net.A_log)) * np.log1p(np.exp(a[t] + exact(net.dt_bias))))
        state = state * g[:, None, None]
        delta = (v.reshape(Hv, Dv) - np.einsum("hvk,hk->hv", state, k)) / (1 + np.exp(-b[t]))[:, None]
        state = state + delta[:, :, None] * k[:, None, :]
        y = np.einsum("hvk,hk->hv", state, q) / np.sqrt(Dk)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + net.norm.eps) * exact(net.norm.weight)
        outputs.append(y * z[t] / (1 + np.exp(-z[t])))
    return np.stack(outputs), state


@every_case
def test_a_prompt_is_that_of_float64(backend: Backend, sizes: Sizes, dtype: str) -> None:
    run = Run(backend, sizes, dtype)
    text, memory = run.text(30), run.memory()
    expected, state = in_float64(run.net, text, memory)
    assert error(run.window(text, memory, certain=30)[0], expected) < 2 * ALLOWED[dtype]
    assert error(memory.state[0], state) < ALLOWED[dtype]


@every_case
def test_windows_with_ragged_acceptance_are_what_mlx_makes_of_them(
    backend: Backend, sizes: Sizes, dtype: str
) -> None:
    run, reference = Run(backend, sizes, dtype), Run(Backend(), sizes, dtype)
    ours, theirs = run.memory(2), run.memory(2)
    # Width, certain, accepted of the last window's drafts; widths beyond 8 need a second tile.
    for seed, (width, certain, accepted) in enumerate(
        [(11, 11, (0, 0)), (4, 1, (0, 0)), (9, 1, (3, 1)), (1, 1, (8, 0)), (12, 2, (0, 0)), (2, 1, (10, 9))]
    ):
        text = run.text(width, 2, seed)
        found, expected = (
            each.window(text, kept, accepted, certain) for each, kept in ((run, ours), (reference, theirs))
        )
        assert error(found, expected) < ALLOWED[dtype]
        assert error(ours.state, theirs.state) < ALLOWED[dtype]
        assert mx.array_equal(ours.conv, theirs.conv)
        assert (ours.pending is None) == (theirs.pending is None) == (width == certain)
        if width > certain:
            found_drafts, expected_drafts = run.drafts(ours), run.drafts(theirs)
            assert mx.array_equal(found_drafts.qkv, expected_drafts.qkv)
            pairs = zip(found_drafts[1:], expected_drafts[1:], strict=True)
            assert all(error(a, b) < ALLOWED[dtype] for a, b in pairs)


@every_case
def test_a_window_has_the_bits_of_its_tokens_one_by_one(backend: Backend, sizes: Sizes, dtype: str) -> None:
    run = Run(backend, sizes, dtype)
    for width, certain in ((2, 2), (4, 1), (9, 9), (10, 1), (17, 17)):
        text, then = run.text(width), run.text(1, seed=9)
        together, alone = run.memory(), run.memory()
        assert mx.array_equal(run.window(text, together, certain=certain), run.one_by_one(text, alone, width))
        # Folding the accepted drafts of the window leaves the state of the tokens one by one.
        assert mx.array_equal(run.window(then, together, [width - certain]), run.window(then, alone))
        assert mx.array_equal(together.state, alone.state)
        assert mx.array_equal(together.conv, alone.conv)


@every_case
@pytest.mark.parametrize("accepted", [(0, 3), (2, 1)])
def test_folded_drafts_leave_the_bits_of_tokens_that_were_never_in_doubt(
    backend: Backend, sizes: Sizes, dtype: str, accepted: Sequence[int]
) -> None:
    """A window of one and three drafts, then one whose tokens follow what each row accepted."""
    run = Run(backend, sizes, dtype)
    first, then, speculated = run.text(4, 2, seed=1), run.text(3, 2, seed=2), run.memory(2)
    run.window(first, speculated)
    y = run.window(then, speculated, accepted)
    for row, count in enumerate(accepted):
        plain, only = run.memory(), slice(row, row + 1)
        run.one_by_one(part(first, 0, 1 + count, only), plain, 1 + count)
        assert mx.array_equal(y[only, :1], run.one_by_one(part(then, 0, 1, only), plain, 1))
        assert mx.array_equal(speculated.state[only], plain.state)
        assert mx.array_equal(speculated.conv[only], plain.conv)
        assert mx.array_equal(y[only, 1:], run.one_by_one(part(then, 1, 3, only), plain, 2))


@pytest.mark.parametrize(
    "backend", ["cpu", *(pytest.param(name, marks=SLOW) for name in ("cuda", "metal"))], indirect=True
)
def test_any_number_of_fifteen_pending_drafts_is_folded(backend: Backend) -> None:
    """Two windows of sixteen: row r accepts r drafts of the first. All must have the bits of single tokens."""
    run, rows = Run(backend, SMALL, "float32"), 16
    first, then, speculated = run.text(rows, rows, seed=1), run.text(rows, rows, seed=2), run.memory(rows)
    run.window(first, speculated)
    y = run.window(then, speculated, [*range(rows)])
    plain, ys, states = run.memory(rows), [], []
    for t in range(2 * rows):  # of each row: what it accepted, then the second window
        at = [t if t <= row else min(rows + t - row - 1, 2 * rows - 1) for row in range(rows)]
        both = [mx.concatenate(pair, axis=1) for pair in zip(first, then, strict=True)]
        ys.append(
            run.window(Window(*[mx.stack([a[row, i : i + 1] for row, i in enumerate(at)]) for a in both]), plain)
        )
        states.append(plain.state)
    alone = mx.concatenate(ys, axis=1)
    for row in range(rows):
        assert mx.array_equal(y[row], alone[row, row + 1 : row + 1 + rows]), row
        assert mx.array_equal(speculated.state[row], states[row + 1][row]), row


@every_case
def test_a_row_has_the_same_bits_whatever_stands_beside_it(backend: Backend, sizes: Sizes, dtype: str) -> None:
    run = Run(backend, sizes, dtype)
    text, crowd = run.text(4, 5), run.memory(5)
    kept = mx.array(crowd.state)
    y = run.window(text, crowd)
    for row in range(5):
        alone, only = run.memory(), slice(row, row + 1)
        assert mx.array_equal(run.window(part(text, 0, 4, only), alone), y[only])
        assert mx.array_equal(alone.state, crowd.state[only])
    assert mx.array_equal(kept, run.memory(5).state), "an input that is still needed is not overwritten"
