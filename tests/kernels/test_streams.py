"""Mixtures of residual streams: what their definition says, each row by itself."""

import mlx.core as mx
import numpy as np
import pytest
from backends import choose_kernels

from headstart.kernels import Backend
from headstart.kernels.streams import HyperConnection, StreamEnd

HIDDEN, STREAMS, ITERATIONS, EPS, NORM_EPS = 48, 4, 6, 1e-3, 1e-5


def connection(seed: int, *, injects: bool = True) -> HyperConnection:
    made = HyperConnection(HIDDEN, STREAMS, NORM_EPS, ITERATIONS, EPS, injects=injects)
    keys = mx.random.split(mx.random.key(seed), 3)
    made.fn.weight = mx.random.normal(made.fn.weight.shape, key=keys[0]) / 8
    made.base = mx.random.normal(made.base.shape, key=keys[1])
    made.scale = 1 + mx.random.normal(made.scale.shape, key=keys[2]) / 3
    return made


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def products(hc: HyperConnection, x: np.ndarray) -> np.ndarray:
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPS)
    return normed @ np.array(hc.fn.weight, np.float64).T


def expected_mixture(hc: HyperConnection, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scale, base, found = np.array(hc.scale, np.float64), np.array(hc.base, np.float64), products(hc, x)
    made = found * np.repeat(scale, [STREAMS, STREAMS, STREAMS**2]) + base
    mean, shares, mixture = sigmoid(made[:4]) + EPS, 2 * sigmoid(made[4:8]), made[8:].reshape(STREAMS, STREAMS)
    mixture = np.exp(mixture) / np.exp(mixture).sum(-1, keepdims=True) + EPS
    mixture = mixture / (mixture.sum(0) + EPS)
    for _ in range(ITERATIONS - 1):
        mixture = mixture / (mixture.sum(1, keepdims=True) + EPS)
        mixture = mixture / (mixture.sum(0) + EPS)
    streams = x.reshape(STREAMS, HIDDEN)
    return mean @ streams, (mixture.T @ streams).reshape(-1), shares


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda", "metal"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hyper_connection_mixes_streams_as_its_definition_says(backend: Backend, dtype: str) -> None:
    hc, kind = connection(0), getattr(mx, dtype)
    choose_kernels(backend, mx.float32, ["streams"], hc)
    x = mx.random.normal((2, 3, STREAMS * HIDDEN), key=mx.random.key(1)).astype(kind)
    made = mx.random.normal((2, 3, HIDDEN), key=mx.random.key(2)).astype(kind)
    mixed = backend.mix(x, hc)
    after = backend.inject(mixed.streams, made, mixed.shares)
    assert mixed.mean.dtype == after.dtype == kind
    near = 2e-6 if dtype == "float32" else 1e-2
    for at in np.ndindex(2, 3):
        mean, streams, shares = expected_mixture(hc, np.array(x[at].astype(mx.float32), np.float64))
        each = np.array(made[at].astype(mx.float32), np.float64)
        total = streams + (shares[:, None] * each).reshape(-1)
        assert np.abs(np.array(mixed.mean[at].astype(mx.float32)) - mean).max() < near * np.abs(mean).max()
        assert np.abs(np.array(after[at].astype(mx.float32)) - total).max() < near * np.abs(total).max()


@pytest.mark.parametrize("backend", ["reference", "cpu"], indirect=True)
@pytest.mark.parametrize("weighted", [True, False])
def test_a_stack_ends_in_the_norm_of_a_mean(backend: Backend, weighted: bool) -> None:
    hc = connection(3, injects=False) if weighted else None
    end = StreamEnd(HIDDEN, STREAMS, NORM_EPS, hc)
    end.weight = mx.random.normal((HIDDEN,), key=mx.random.key(4))
    x = mx.random.normal((2, 3, STREAMS * HIDDEN), key=mx.random.key(5))
    found = backend.norm(x, end)
    for at in np.ndindex(2, 3):
        row = np.array(x[at], np.float64)
        weights = np.full(STREAMS, 1 / STREAMS)
        if hc is not None:
            weights = sigmoid(products(hc, row) * float(hc.scale[0]) + np.array(hc.base, np.float64)) + EPS
        mean = weights @ row.reshape(STREAMS, HIDDEN)
        expected = mean / np.sqrt((mean**2).mean() + NORM_EPS) * np.array(end.weight)
        assert np.abs(np.array(found[at]) - expected).max() < 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("backend", ["cpu", "cuda", "metal"], indirect=True)
def test_a_row_of_streams_does_not_depend_on_the_others(backend: Backend) -> None:
    hc = connection(6)
    choose_kernels(backend, mx.float32, ["streams"], hc)
    products = mx.random.normal((5, 3, (2 + STREAMS) * STREAMS), key=mx.random.key(8))
    together = backend.hyper_weights(products, hc)
    for row, column in np.ndindex(5, 3):
        alone = backend.hyper_weights(products[row : row + 1, column : column + 1], hc)
        assert all(mx.array_equal(a[row, column], b[0, 0]) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("backend", ["cpu"], indirect=True)
def test_a_row_is_mixed_the_same_alone_and_beside_others(backend: Backend) -> None:
    hc, end = connection(6), StreamEnd(HIDDEN, STREAMS, NORM_EPS, connection(7, injects=False))
    x = mx.random.normal((5, 3, STREAMS * HIDDEN), key=mx.random.key(8))
    together = [*backend.mix(x, hc), backend.norm(x, end)]
    for row, column in np.ndindex(5, 3):
        one = x[row : row + 1, column : column + 1]
        alone = [*backend.mix(one, hc), backend.norm(one, end)]
        assert all(mx.array_equal(a[row, column], b[0, 0]) for a, b in zip(together, alone, strict=True))
