"""Attention of the CPU kernels, of every kind that families have, against float64, alone and in company."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, initialize_rope
from test_cpu_kernels import CPU, TYPES, VARIANTS, exact, native, normal, variant

from headstart.kernels.cpu.attention import Heads, heads_of, rotation_of
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.layers import Attention
from headstart.state import KV
from headstart.state.kv import GROUP

pytestmark = pytest.mark.skipif(not isinstance(CPU, CpuBackend), reason="no CPU kernels here")


@dataclass(frozen=True)
class Kind:
    """An attention layer: its sizes, and what a family has beside."""

    heads: int = 6
    kv_heads: int = 2
    key: int = 64
    value: int = 64
    rotated: int = 64
    interleaved: bool = False
    normed: bool = False
    gates: str = ""  # "element" or "head"
    window: int = 0
    eight_bits: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def spec(self) -> Heads:
        norms = [normal(seed, self.key) for seed in (31, 32)] if self.normed else [None, None]
        turns = mx.array([10000.0 ** (-2 * i / self.rotated) for i in range(self.rotated // 2)])
        extra = {name: mx.array(a) if isinstance(a, list) else a for name, a in self.extra.items()}
        given = turns if self.rotated else None, self.interleaved
        return Heads(self.heads, self.kv_heads, 0.2, 1e-6, *norms, *given)._replace(**extra)


KINDS = {
    "plain": Kind(),
    "one head of keys": Kind(heads=20, kv_heads=1),
    "partial rotation, norms": Kind(rotated=16, normed=True),
    "interleaved": Kind(interleaved=True, rotated=32, extra={"rotation_scale": 1.2}),
    "no rotation, small heads": Kind(key=16, value=16, rotated=0),
    "odd sizes, sinks, window": Kind(
        key=24, value=40, rotated=8, window=70, extra={"value_scale": 0.7, "sinks": [0.5, 9.0, -3.0, 0.0, 1.0, 2.0]}
    ),
    "gates of elements": Kind(gates="element"),
    "gates of heads, window": Kind(gates="head", window=513),
    "scaled queries": Kind(extra={"query_scales": [1.0, 1.5, 2.0], "period": 300}),
    "window of one": Kind(window=1),
    "eight bits": Kind(eight_bits=True),
    "eight bits, sinks, window": Kind(
        eight_bits=True, value=32, window=100, extra={"sinks": [0.5, 9.0, -3.0, 0.0, 1.0, 2.0]}
    ),
}


def cached(kind: Kind, lengths: list[int], capacity: int, dtype: str) -> KV:
    """A cache with random keys and values up to each length, and NaN behind it, which nobody may read."""
    kv = KV.empty(len(lengths), kind.kv_heads, kind.key, getattr(mx, dtype), kind.value, eight_bits=kind.eight_bits)
    kv.grow(capacity)
    kv.reach = capacity
    shapes = [(len(lengths), kind.kv_heads, capacity, size) for size in (kind.key, kind.value)]
    kv.update_and_fetch(*(normal(n, *shape, dtype=dtype) for n, shape in zip((7, 8), shapes, strict=True)))
    seen = mx.arange(capacity)[None, None, :, None] < mx.array(lengths)[:, None, None, None]
    kv.keys, kv.values, *kv.scales = (
        a if a.dtype == mx.int8 else mx.where(seen, a, mx.nan).astype(a.dtype) for a in kv.arrays()
    )
    kv.offset = mx.array(lengths, mx.int32)
    return kv


def given(kind: Kind, rows: int, width: int, dtype: str) -> list[mx.array]:
    """Queries, keys, values and gates as a layer's projections make them."""
    sizes = (kind.heads * kind.key * (1 + (kind.gates == "element")), kind.kv_heads * kind.key)
    sizes = (*sizes, kind.kv_heads * kind.value, *([kind.heads] if kind.gates == "head" else []))
    return [normal(20 + n, rows, width, size, dtype=dtype) for n, size in enumerate(sizes)]


def run(
    kind: Kind,
    kv: KV,
    window: list[mx.array],
    last: mx.array | None = None,
    module: Any = None,
    spec: Heads | None = None,
) -> mx.array:
    q, k, v, *gates = window
    given = q, k, v, gates[0] if gates else None, spec or kind.spec(), kv.arrays(), kv.offset, kind.window, None, last
    out, kv.keys, kv.values, *kv.scales = (module or native()).attention(*given)
    made: mx.array = out
    return made


def arranged(kind: Kind, x: np.ndarray, norm: mx.array | None, start: int) -> np.ndarray:
    """x [heads, W, D], normed and rotated in float64."""
    spec = kind.spec()
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.eps) * exact(norm)
    if spec.frequencies is None:
        return x
    half, x = kind.rotated // 2, x.copy()
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if kind.interleaved else (slice(half), slice(half, 2 * half))
    )
    positions = np.arange(start, start + x.shape[1], dtype=np.float32)
    angles = (positions[:, None] * np.array(spec.frequencies)).astype(np.float64)  # rounded, as mlx's are
    a, b = x[..., first] * spec.rotation_scale, x[..., second] * spec.rotation_scale
    x[..., first] = a * np.cos(angles) - b * np.sin(angles)
    x[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return x


def held(kv: KV, row: int, length: int) -> list[np.ndarray]:
    """Keys and values of a sequence as they are kept, [heads, length, D]."""
    arrays = [exact(a[row, :, :length]) for a in kv.arrays()]
    if not kv.scales:
        return arrays
    return [codes * np.repeat(scales, GROUP, axis=-1) for codes, scales in zip(arrays[:2], arrays[2:], strict=True)]


def by_head(x: mx.array, row: int, heads: int) -> np.ndarray:
    return exact(x[row]).reshape(x.shape[1], heads, -1).transpose(1, 0, 2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", KINDS)
def test_attention_is_that_of_float64(name: str, dtype: str) -> None:
    """Over more positions than a split has, and more queries than a tile."""
    kind, lengths, width = KINDS[name], [1000, 3], 45
    kv, window, spec = cached(kind, lengths, 1050, dtype), given(kind, 2, width, dtype), kind.spec()
    found = run(kind, kv, window)
    q, k, v, *gates = window
    exactness = 2.0**-8 if dtype == "bfloat16" else 2.0**-20
    for row, length in enumerate(lengths):
        queries = by_head(q, row, kind.heads)
        sigmoids = 1 / (1 + np.exp(-queries[..., kind.key :])) if kind.gates == "element" else 1.0
        if kind.gates == "head":
            sigmoids = 1 / (1 + np.exp(-by_head(gates[0], row, kind.heads)))
        queries = arranged(kind, queries[..., : kind.key], spec.q_norm, length)
        if spec.query_scales is not None:
            period = np.minimum((length + np.arange(width)) // spec.period, 2)
            queries = queries * exact(spec.query_scales)[period][:, None]
        keys, values = held(kv, row, length + width)
        new = [arranged(kind, by_head(k, row, kind.kv_heads), spec.k_norm, length)]
        new.append(by_head(v, row, kind.kv_heads) * spec.value_scale)
        for kept, true in zip((keys, values), new, strict=True):
            groups = np.abs(true).reshape(*true.shape[:2], -1, GROUP).max(-1) if kind.eight_bits else np.zeros(1)
            step = np.repeat(groups, GROUP, axis=-1) / 127 / 2 if kind.eight_bits else 0.0
            assert np.all(np.abs(kept[:, length:] - true) <= 1.02 * step + 2 * exactness * np.abs(true) + 2e-4)
        share = kind.heads // kind.kv_heads
        scores = spec.scale * queries @ np.repeat(keys, share, axis=0).transpose(0, 2, 1)
        own, at = length + np.arange(width)[:, None], np.arange(length + width)
        scores[:, (at > own) | (at <= own - (kind.window or 10**9))] = -np.inf
        sinks = np.full((kind.heads, 1, 1), -np.inf) if spec.sinks is None else exact(spec.sinks)[:, None, None]
        most = np.maximum(scores.max(-1, keepdims=True), sinks)
        chances = np.exp(scores - most)
        chances = chances / (chances.sum(-1, keepdims=True) + np.exp(sinks - most))
        expected = chances @ np.repeat(values, share, axis=0) * sigmoids
        expected = expected.transpose(1, 0, 2).reshape(width, -1)
        np.testing.assert_allclose(exact(found[row]), expected, rtol=4 * exactness, atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", KINDS)
def test_a_query_is_the_same_alone_and_in_a_window(name: str, dtype: str) -> None:
    """Also where its positions are more than a split, queries more than a tile, and `last` asks for one of them."""
    kind, lengths, width, capacity = KINDS[name], [1010, 5], 70, 1090
    together, window = cached(kind, lengths, capacity, dtype), given(kind, 2, width, dtype)
    found = run(kind, together, window)
    asked = run(kind, cached(kind, lengths, capacity, dtype), window, mx.array([width - 1, 3], mx.int32))
    assert mx.array_equal(asked, mx.stack([found[0, -1:], found[1, 3:4]]))
    for row, length in enumerate(lengths):
        alone = cached(kind, lengths, capacity + 77, dtype)
        alone.keep(mx.array([row]), capacity + 77)
        for array, past in zip(alone.arrays(), together.arrays(), strict=True):
            array[:, :, :length] = past[row : row + 1, :, :length]
        for w, end in pairwise([*range(20), *range(20, width + 1, 7)]):
            alone.offset = mx.array([length + w], mx.int32)
            few = run(kind, alone, [a[row : row + 1, w:end] for a in window])
            assert mx.array_equal(few, found[row : row + 1, w:end]), (row, w)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_other_cpus_compute_the_same_bits(name: str, dtype: str) -> None:
    for kind in KINDS.values():
        window = given(kind, 2, 9, dtype)
        ours, theirs = (cached(kind, [600, 3], 650, dtype) for _ in range(2))
        assert mx.array_equal(run(kind, ours, window), run(kind, theirs, window, module=variant(name)))
        for mine, other in zip(ours.arrays(), theirs.arrays(), strict=True):
            assert mx.array_equal(mine, other, equal_nan=mine.dtype != mx.int8)


@pytest.mark.parametrize("dtype", TYPES)
def test_in_eight_bits_numbers_are_those_that_mlx_rounds_to(dtype: str) -> None:
    kind = Kind(rotated=0, eight_bits=True)
    ours, theirs = (cached(kind, [9, 0], 20, dtype) for _ in range(2))
    window = given(kind, 2, 5, dtype)
    run(kind, ours, window)
    heads = [a.reshape(2, 5, kind.kv_heads, -1).transpose(0, 2, 1, 3) for a in window[1:3]]
    theirs.update_and_fetch(*heads)
    for mine, true in zip(ours.arrays(), theirs.arrays(), strict=True):
        assert mx.array_equal(mine, true, equal_nan=mine.dtype != mx.int8)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_number_in_eight_bits_that_is_not_finite_is_not_hidden(dtype: str) -> None:
    kind = Kind(rotated=0, eight_bits=True)
    for odd in (mx.nan, mx.inf):
        window = given(kind, 1, 2, dtype)
        window[2][0, 0, 40] = odd
        assert mx.isnan(run(kind, cached(kind, [3], 20, dtype), window)).any()


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + n for n in range(16)],
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_is_that_of_mlx_lms_module(name: str, interleaved: bool) -> None:
    rope = initialize_rope(32, 10000.0, interleaved, SCALINGS[name], 512)
    rotation = rotation_of(rope)
    assert rotation is not None
    assert rotation_of(rope) is rotation, "made once"
    kind = replace(KINDS["plain"], key=48, value=32)
    kv = KV.empty(1, kind.kv_heads, kind.key, mx.float32, kind.value)
    kv.grow(200)
    kv.offset = mx.array([150], mx.int32)
    window = given(kind, 1, 20, "float32")
    spec = kind.spec()._replace(
        frequencies=rotation.frequencies, interleaved=rotation.interleaved, rotation_scale=rotation.scale
    )
    run(kind, kv, window, spec=spec)
    expected = rope(window[1].reshape(1, 20, kind.kv_heads, -1).transpose(0, 2, 1, 3), offset=150)
    np.testing.assert_allclose(exact(kv.keys[:, :, 150:170]), exact(expected), rtol=1e-4, atol=2e-5)


def test_a_rotation_that_depends_on_the_length_is_left_to_mlx() -> None:
    assert rotation_of(DynamicNTKScalingRoPE(32, 512, False, 10000.0, 2.0)) is None
    layer = nn.Module()
    layer.rope = DynamicNTKScalingRoPE(32, 512, False, 10000.0, 2.0)
    assert heads_of(Attention(layer, 2, 2), mx.float32) is None


def test_a_prompt_takes_memory_that_grows_with_its_length_alone() -> None:
    """Scores of 6 heads and 8,000 positions would be 1.5 GB."""
    kind = Kind()
    kv, window = cached(kind, [0], 8000, "float32"), given(kind, 1, 8000, "float32")
    mx.eval(window, kv.arrays())
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(run(kind, kv, window))
    assert mx.get_peak_memory() - before < 60e6
