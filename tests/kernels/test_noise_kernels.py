"""The CUDA kernels of random words, run on the CPU: the words of stock operations."""

import math
from collections.abc import Iterator

import cuda_on_cpu
import mlx.core as mx
import numpy as np
import pytest

from headstart.kernels.cuda import noise as kernels
from headstart.sampling import noise


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated((kernels._keys_kernel, kernels._words_kernel)):
        yield


def words(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(len(shape)).integers(0, 2**32, shape).astype(np.uint32))


def test_keys_are_those_of_stock_operations() -> None:
    keys, rounds = (words(3), words(1, 3)[0]), mx.array([0, 7, 2**31 - 1])
    purposes, positions = (
        mx.array([[0, 1, 2, 3, 4], [0, 0, 2, 0, 4], [4, 3, 2, 1, 0]]),
        mx.arange(3 * 70).reshape(3, 70),
    )
    found = kernels.launch_noise_keys(keys, rounds, purposes, positions)
    for one, other in zip(found, noise.keys_of_step(keys, rounds, purposes, positions), strict=True):
        assert one.shape == (3, 5, 70)
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_words_are_those_of_stock_operations(shape: tuple[int, ...]) -> None:
    keys = (words(*shape), words(1, *shape)[0])
    own = mx.arange(math.prod(shape) * 20).reshape(*shape, 20)
    for ids in (mx.arange(333), mx.zeros((1,), mx.int32), own):
        found = kernels.launch_noise_words(keys, ids)
        assert found.shape == (*shape, ids.shape[-1])
        assert mx.array_equal(found, noise.bits(keys, ids))
