"""The kernel that chooses a row's experts, run on the CPU."""

from collections.abc import Iterator

import cuda_on_cpu
import mlx.core as mx
import numpy as np
import pytest

from headstart.kernels.cuda import experts


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated([experts._route]):
        yield


@pytest.mark.parametrize(
    ("dtype", "count", "top"),
    [
        (mx.bfloat16, 33, 8),
        (mx.float16, 256, 8),
        pytest.param(mx.bfloat16, 20, 20, marks=pytest.mark.slow),
        pytest.param(mx.float16, 60, 1, marks=pytest.mark.slow),
    ],
)
def test_the_largest_logits_are_chosen_and_of_equals_the_first(dtype: mx.Dtype, count: int, top: int) -> None:
    draws = np.random.default_rng(count).integers(-4, 4, (5, count)) / 2  # many are equal
    draws[1, ::3] = -np.inf
    draws[2] = 0.0
    draws[3, : count // 2] *= 100
    logits = mx.array(draws, mx.float32).astype(dtype)
    indices, scores = experts.launch_route(logits, top, normed=True)
    expected = np.argsort(-draws, axis=-1, kind="stable")[:, :top]
    assert np.array_equal(np.array(indices), expected)
    shares = np.exp(np.take_along_axis(draws, expected, axis=-1) - draws.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    assert np.allclose(np.array(scores.astype(mx.float32)), shares, atol=0.01)
