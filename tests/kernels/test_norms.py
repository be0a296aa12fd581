"""RMS norms, and the addition before them, on every backend."""

import mlx.core as mx
import numpy as np
import pytest
from backends import NAMES, ROUNDING, SLOW, TYPES, choose_kernels, error, exact, normal, same

from headstart.kernels import Backend
from headstart.kernels.norms import Norm

CASES = [
    *(("reference", size, dtype) for size in (72, 390) for dtype in ("bfloat16", "float16", "float32")),
    *(("cpu", size, dtype) for size in (72, 390, 2688) for dtype in TYPES["cpu"]),
    *(("cuda", size, dtype) for size in (512, 72) for dtype in TYPES["cuda"]),
    ("cuda", 390, "bfloat16"),  # no multiple of 8
    ("metal", 72, "bfloat16"),
    pytest.param("metal", 1000, "float32", marks=SLOW),
    pytest.param("metal", 40, "float16", marks=SLOW),
]


def norm_of(size: int) -> Norm:
    norm = Norm(size, 1e-6)
    norm.weight = mx.random.uniform(0.5, 1.5, (size,), key=mx.random.key(size))
    return norm


@pytest.mark.parametrize(("backend", "size", "dtype"), CASES, indirect=["backend"])
def test_a_sum_and_its_norm_are_those_of_float64_and_rows_are_independent(
    backend: Backend, size: int, dtype: str
) -> None:
    kind, norm = getattr(mx, dtype), norm_of(size)
    choose_kernels(backend, kind, ["norm"], norm)
    x, added = (normal(16, size, seed=seed, dtype=kind) for seed in (1, 2))
    total, normed = backend.add_and_norm(x, added, norm.weight, norm.eps)
    assert mx.array_equal(total, x + added)
    wide = exact(total)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * exact(norm.weight)
    assert error(normed, expected) < ROUNDING[kind]
    assert mx.array_equal(backend.norm(total, norm), normed)
    for rows in (1, 3, 15):
        alone = backend.add_and_norm(x[16 - rows :], added[16 - rows :], norm.weight, norm.eps)
        assert same((alone[0], total[16 - rows :]), (alone[1], normed[16 - rows :])), rows


@pytest.mark.parametrize("backend", NAMES, indirect=True)
def test_a_norm_with_another_weight_than_float32_is_what_mlx_makes_of_it(backend: Backend) -> None:
    norm, x = norm_of(64), normal(3, 64, seed=1)
    choose_kernels(backend, mx.bfloat16, ["norm"], norm)
    norm.weight = norm.weight.astype(mx.bfloat16)
    assert error(backend.norm(x, norm), Backend().norm(x, norm)) < ROUNDING[mx.bfloat16]
