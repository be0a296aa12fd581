"""Products of a prompt's rows on CUDA: the matrix dequantised, and numbers of rows for which bits do not change."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from backends import SLOW, error, exact, normal, running, weights_of

from headstart.kernels.cuda import full_matrix as products
from headstart.kernels.cuda.full_matrix import full_matrix, largest_class, parts_of, wide_product
from headstart.kernels.weights import matrix_weights, scaled_layer


@pytest.fixture(scope="module", autouse=True)
def card() -> Iterator[None]:
    with running("cuda"):
        yield


@pytest.fixture(autouse=True)
def few_heights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(products, "HEIGHTS", (4, 8, 16))
    products.heights_of.cache_clear()
    yield
    products.heights_of.cache_clear()


def linear(outputs: int, inputs: int, dtype: mx.Dtype = mx.bfloat16, **quantised: Any) -> nn.Module:
    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight = normal(outputs, inputs, seed=1, dtype=mx.float32)
    made = layer.to_quantized(**quantised) if quantised else layer
    made.set_dtype(dtype)
    return made


@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    [
        (4, 64, mx.bfloat16),
        (8, 32, mx.float16),
        *(pytest.param(bits, 32, mx.bfloat16, marks=SLOW) for bits in (2, 3, 5, 6)),
    ],
)
def test_a_matrix_is_dequantised_with_one_rounding(bits: int, group: int, dtype: mx.Dtype) -> None:
    layer = linear(24, 128, dtype, bits=bits, group_size=group)
    made = full_matrix(matrix_weights(layer), dtype)
    assert made.dtype == dtype
    assert mx.array_equal(made, mx.array(weights_of(layer)).astype(dtype))


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_floats_are_dequantised_exactly(mode: str) -> None:
    layer = linear(24, 128, mode=mode)
    assert mx.array_equal(full_matrix(matrix_weights(layer), mx.bfloat16), mx.array(weights_of(layer)))
    x = normal(7, 128, seed=2)
    assert error(wide_product(x, layer), exact(x) @ weights_of(layer).T) < 3e-3


def test_a_scale_of_the_whole_matrix_counts() -> None:
    layer = linear(24, 128, mode="nvfp4")
    scaled = scaled_layer(layer)
    scaled.update({"weight": layer.weight, "scales": layer.scales, "global_scale": mx.array(448.0 * 6 * 3)})
    x = normal(5, 128, seed=2)
    assert error(wide_product(x, scaled), 3 * exact(wide_product(x, layer))) < 5e-3


def test_rows_are_padded_to_heights() -> None:
    assert parts_of(3, (4, 8, 16)) == [4]
    assert parts_of(16, (4, 8, 16)) == [16]
    assert parts_of(17, (4, 8, 16)) == [16, 4]
    assert parts_of(45, (8, 16)) == [16, 16, 16]
    layer, x = linear(24, 128, bits=4, group_size=64), normal(2, 21, 128, seed=3)
    made = wide_product(x, layer)
    assert made.shape == (2, 21, 24)
    assert error(made, exact(x) @ weights_of(layer).T) < 3e-3


def test_heights_are_those_that_keep_bits() -> None:
    assert largest_class([4, 8, 16], lambda a, b: True) == (4, 8, 16)
    assert largest_class([4, 8, 16, 32, 64], lambda a, b: a // 32 == b // 32) == (4, 8, 16)
    assert largest_class([4, 8, 16, 32], lambda a, b: (a < 16) == (b < 16)) == (16, 32)
    assert largest_class([4, 8], lambda a, b: False) == (8,)


def test_a_product_whose_bits_change_with_the_rows_uses_heights_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuBLAS has them: products of eight rows and more are summed in another way than those of four."""

    def same(a: mx.array, b: mx.array) -> bool:
        moved = a.shape[0] > b.shape[0]
        return moved or (a.shape[0] < 8) == (b.shape[0] < 8)

    monkeypatch.setattr(products, "_same", same)
    assert products.heights_of(24, 128, mx.bfloat16) == (8, 16)
    layer, x = linear(24, 128), normal(9, 128, seed=4)
    whole = wide_product(x, layer)
    assert mx.array_equal(wide_product(x[:3], layer), whole[:3])
