"""The CUDA kernels of products, run on the CPU: what they compute, that a row's bits depend on it alone, and when
mlx's products are taken instead."""

from collections.abc import Iterator

import cuda_on_cpu
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from headstart.kernels import Backend
from headstart.kernels.cuda import backend, products
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.cuda.experts import launch_experts
from headstart.kernels.cuda.products import MOST_ROWS, launch_products, product_refusal
from headstart.kernels.weights import MatrixWeights, matrix_weights

K = 384  # few chunks of 4-bit codes, more of 8-bit ones: not the same number for every slice
LONG = 2560  # of 4-bit codes: chunks of a line of memory, two or three of them a slice
SLOW = pytest.mark.slow

CUDA = CudaBackend()


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated():
        yield


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def random_weights(shape: tuple[int, ...], bits: int, group: int, dtype: mx.Dtype = mx.bfloat16) -> MatrixWeights:
    weight = 0.1 * normal(*shape, seed=7, dtype=mx.float32)
    if bits == 16:
        return MatrixWeights(weight.astype(dtype))
    codes, scales, biases = mx.quantize(weight, group, bits)
    return MatrixWeights(codes, scales.astype(dtype), biases.astype(dtype), bits, group)


def exact(weights: MatrixWeights) -> mx.array:
    if weights.scales is None or weights.biases is None:
        return weights.weight.astype(mx.float32)
    scales, biases = weights.scales.astype(mx.float32), weights.biases.astype(mx.float32)
    return mx.dequantize(weights.weight, scales, biases, weights.group, weights.bits)


def error(found: mx.array, expected: mx.array) -> float:
    return float(mx.linalg.norm(found.astype(mx.float32) - expected) / mx.linalg.norm(expected))


@pytest.mark.parametrize(
    ("bits", "group", "inputs", "outputs", "dtype"),
    [
        (4, 64, K, 48, mx.bfloat16),
        pytest.param(4, 32, K, 33, mx.float16, marks=SLOW),
        pytest.param(4, 128, K, 16, mx.bfloat16, marks=SLOW),
        (4, 64, 64, 1, mx.bfloat16),  # less than a chunk, less than a tile
        pytest.param(8, 64, K, 48, mx.bfloat16, marks=SLOW),
        (8, 32, 96, 33, mx.float16),
        pytest.param(16, 1, K, 48, mx.bfloat16, marks=SLOW),
        pytest.param(4, 64, LONG, 100, mx.bfloat16, marks=SLOW),
        pytest.param(8, 128, 1280, 40, mx.bfloat16, marks=SLOW),
        (16, 1, 640, 40, mx.float16),
    ],
)
@pytest.mark.parametrize("rows", [3, pytest.param(19, marks=SLOW)])
def test_a_product_is_that_of_the_weights_that_the_codes_stand_for(
    bits: int, group: int, inputs: int, outputs: int, dtype: mx.Dtype, rows: int
) -> None:
    weights, x = random_weights((outputs, inputs), bits, group, dtype), normal(rows, inputs, seed=1, dtype=dtype)
    found = launch_products(x, [weights])[0]
    # What is left is the rounding of the output.
    assert error(found, x.astype(mx.float32) @ exact(weights).T) < (3e-3 if dtype == mx.bfloat16 else 4e-4)


@pytest.mark.parametrize(
    ("inputs", "bits", "group"),
    [
        (K, 4, 64),
        *(pytest.param(*case, marks=SLOW) for case in ((LONG, 4, 32), (LONG // 2, 8, 64), (640, 16, 1))),
    ],
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(inputs: int, bits: int, group: int) -> None:
    # Everything cancels, so that what is left is the rounding of the sums: another order would show in every bit.
    half = random_weights((40, inputs), bits, group)
    weights = MatrixWeights(*[mx.concatenate([array] * 2, axis=1) for array in half.arrays()], bits=bits, group=group)
    x = normal(70, inputs, seed=2)
    x = mx.concatenate([x, -x], axis=1)
    together = launch_products(x, [weights])[0]
    for rows in (1, 2, 8, 9, 16, 17, 40):
        assert mx.array_equal(launch_products(x[70 - rows :], [weights])[0], together[70 - rows :]), rows


@pytest.mark.parametrize("rows", [pytest.param(2, marks=SLOW), 12])
def test_a_block_that_takes_tile_after_tile_has_the_bits_of_one_that_takes_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [random_weights((outputs, LONG), 4, 64) for outputs in (120, 1, 33)]
    x = normal(rows, LONG, seed=3)
    one = launch_products(x, several)
    for blocks in (1, 3, 7):
        monkeypatch.setattr(products, "FULL", blocks)
        assert all(map(mx.array_equal, launch_products(x, several), one)), blocks


def test_layers_that_share_an_input_have_the_bits_of_each_alone() -> None:
    several = [random_weights((outputs, K), 4, 64) for outputs in (48, 1, 33)]
    x = normal(2, 1, K, seed=3)
    for found, weights in zip(launch_products(x, several), several, strict=True):
        assert mx.array_equal(found, launch_products(x, [weights])[0])


@pytest.mark.parametrize(("bits", "rows"), [(4, 3), pytest.param(16, 11, marks=SLOW)])
def test_a_gated_product_is_silu_of_the_gate_times_up(bits: int, rows: int) -> None:
    both, x = random_weights((2, 40, K), bits, 64 if bits < 16 else 1), normal(rows, K, seed=4)
    gate, up = (MatrixWeights(*[a[i] for a in both.arrays()], bits=bits, group=both.group) for i in (0, 1))
    (found,) = launch_products(x, [gate, up], gated=True)
    plain = [each.astype(mx.float32) for each in launch_products(x, [gate, up])]
    assert error(found, nn.silu(plain[0]) * plain[1]) < 3e-3
    assert mx.array_equal(found[1:2], launch_products(x[1:2], [gate, up], gated=True)[0])
    chosen = mx.array([[1], [0], [1]])
    stacked = [MatrixWeights(*[a[::order] for a in both.arrays()], bits=bits, group=both.group) for order in (1, -1)]
    by_experts = launch_experts(x[:3], chosen, stacked, gated=True)[0]  # expert 0 is (gate, up), expert 1 the reverse
    assert mx.array_equal(by_experts[1], found[1:2])
    assert mx.array_equal(by_experts[0], launch_products(x[:1], [up, gate], gated=True)[0])


# Three experts for nine rows of four choices each: some have more rows than a tile has columns.
@pytest.mark.parametrize(("bits", "count"), [(4, 3), pytest.param(16, 8, marks=SLOW)])
def test_experts_multiply_the_rows_that_chose_them(bits: int, count: int) -> None:
    weights = random_weights((count, 32, 128), bits, 64 if bits < 16 else 1)
    indices = mx.random.randint(0, count, (9, 1, 4), key=mx.random.key(5))
    shared, own = normal(9, 1, 128, seed=6), normal(9, 1, 4, 128, seed=8)
    chosen = exact(weights)[indices]  # [9, 1, 4, N, K]
    for x, each in ((shared, shared[..., None, :]), (own, own)):
        found = launch_experts(x, indices, [weights])[0]
        assert error(found, (chosen @ each.astype(mx.float32)[..., None]).squeeze(-1)) < 3e-3
        alone = mx.concatenate([launch_experts(x[i : i + 1], indices[i : i + 1], [weights])[0] for i in (0, 8)])
        assert mx.array_equal(alone, found[mx.array([0, 8])])


@pytest.mark.parametrize(("count", "top", "normed"), [(256, 8, True), (40, 3, False)])
def test_experts_are_chosen_and_scored_as_stock_ops_do(count: int, top: int, normed: bool) -> None:
    logits = normal(3, 2, count, seed=9)
    logits[0, 0, 7:9] = 5.0  # equals
    indices, scores = CUDA.route(logits, top, normed)
    assert set(indices[0, 0].tolist()) > {7, 8}
    _, expected = Backend().route(logits.astype(mx.float32), top, normed)
    # Equals at the end of the choice may be others there: their scores are the same.
    assert error(mx.sort(scores, axis=-1), mx.sort(expected, axis=-1)) < 3e-3
    assert mx.array_equal(mx.take_along_axis(logits, indices, axis=-1)[..., 0], logits.max(axis=-1))
    alone = CUDA.route(logits[1:2, 1:], top, normed)
    assert mx.array_equal(alone[0], indices[1:2, 1:])
    assert mx.array_equal(alone[1], scores[1:2, 1:])


@pytest.mark.parametrize(("dtype", "count", "top"), [(mx.bfloat16, 33, 8), (mx.float16, 256, 8)])
def test_among_equals_the_first_expert_is_chosen(dtype: mx.Dtype, count: int, top: int) -> None:
    draws = np.random.default_rng(count).integers(-4, 4, (4, count)) / 2  # many are equal
    draws[1, ::3], draws[2] = -np.inf, 0.0
    indices, _ = CUDA.route(mx.array(draws, dtype), top, True)
    assert np.array_equal(np.array(indices), np.argsort(-draws, axis=-1, kind="stable")[:, :top])


def test_what_experts_made_is_combined_as_stock_ops_do() -> None:
    parts, scores = normal(3, 2, 4, 40, seed=1), mx.softmax(normal(3, 2, 4, seed=2), axis=-1)
    shared, gate = normal(3, 2, 40, seed=3), normal(3, 2, 1, seed=4)
    found = CUDA.combine(parts, scores, shared, gate)
    wide = [array.astype(mx.float32) for array in (parts, scores, shared, gate)]
    assert error(found, Backend().combine(*wide)) < 3e-3
    assert mx.array_equal(found[1:2], CUDA.combine(parts[1:2], scores[1:2], shared[1:2], gate[1:2]))


def reasons() -> list[tuple[str, mx.Dtype, MatrixWeights]]:
    four = random_weights((16, 128), 4, 64)
    return [
        ("activations are float32", mx.float32, four),
        ("weights are float32", mx.bfloat16, MatrixWeights(mx.zeros((16, 128)))),
        ("40 inputs are no multiple of 32", mx.bfloat16, MatrixWeights(mx.zeros((16, 40), mx.bfloat16))),
        ("another way than affine", mx.bfloat16, MatrixWeights(*four.arrays(), 4, 64, "mxfp4")),
        ("3 bits in groups of 64", mx.bfloat16, MatrixWeights(four.weight, four.scales, four.biases, 3, 64)),
        ("96 inputs are no multiple of 64", mx.bfloat16, random_weights((16, 96), 4, 32)),
        ("an expert's scales", mx.bfloat16, random_weights((2, 12, 64), 4, 64)),
    ]


@pytest.mark.parametrize(("reason", "dtype", "weights"), reasons())
def test_what_does_not_fit_is_named(reason: str, dtype: mx.Dtype, weights: MatrixWeights) -> None:
    assert reason in (product_refusal(dtype, weights) or "")


def test_a_chunk_of_a_prompt_takes_the_product_of_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(64, 16, bias=False)
    layer.weight = layer.weight.astype(mx.bfloat16)
    assert product_refusal(mx.bfloat16, matrix_weights(layer)) is None
    taken = []
    monkeypatch.setattr(backend, "launch_products", lambda x, weights: taken.append(len(x)) or [layer(x)])
    for rows in (1, MOST_ROWS, MOST_ROWS + 1, 512):
        CUDA.product(normal(rows, 64, seed=1), layer)
    assert taken == [1, MOST_ROWS]
