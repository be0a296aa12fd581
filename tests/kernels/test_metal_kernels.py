"""The Metal kernels' own source, run on the CPU: against float64, and the bits of a row whatever runs beside it. What
only a Mac can show is listed in `headstart.kernels.metal`."""

from collections.abc import Iterator

import metal_on_cpu
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from headstart.kernels import Backend
from headstart.kernels.layers import Attention
from headstart.kernels.metal import attention, device, experts, products
from headstart.kernels.metal.attention import heads_refusal, metal_arrange, metal_attend
from headstart.kernels.metal.experts import PAIR_ROWS, metal_combine, metal_experts, metal_route
from headstart.kernels.metal.norm import metal_norm
from headstart.kernels.metal.products import SLICES, metal_products, metal_refusal
from headstart.kernels.types import HeadNorms
from headstart.kernels.weights import MatrixWeights
from headstart.state import KV

SLOW = pytest.mark.slow
SPLIT, COLUMNS = SLICES["metal-split"], SLICES["metal-columns"]
K = 576  # not the same number of lanes at work in every slice
KERNELS = (device.metal_kernel, products._product_kernel, experts._experts_kernel)


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", metal_on_cpu.metal_kernel)
        patch.setattr(attention, "SPLIT", 32)  # pieces that the emulator gets through
        mx.disable_compile()  # on a CPU, every compiled stock operation costs a run of g++
        for kernel in KERNELS:
            kernel.cache_clear()
        yield
    mx.enable_compile()
    for kernel in KERNELS:
        kernel.cache_clear()


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def random_weights(shape: tuple[int, ...], bits: int, group: int, dtype: mx.Dtype = mx.bfloat16) -> MatrixWeights:
    weight = 0.1 * normal(*shape, seed=sum(shape), dtype=mx.float32)
    if bits == 16:
        return MatrixWeights(weight.astype(dtype))
    codes, scales, biases = mx.quantize(weight, group, bits)
    return MatrixWeights(codes, scales.astype(dtype), biases.astype(dtype), bits, group)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def dequantised(weights: MatrixWeights) -> np.ndarray:
    if weights.scales is None or weights.biases is None:
        return exact(weights.weight)
    ones, zeros = mx.ones(weights.scales.shape), mx.zeros(weights.scales.shape)
    codes = exact(mx.dequantize(weights.weight, ones, zeros, weights.group, weights.bits))
    scales, biases = (np.repeat(exact(a), weights.group, -1) for a in (weights.scales, weights.biases))
    return codes * scales + biases


def error(found: mx.array, expected: np.ndarray | mx.array) -> float:
    right = exact(expected) if isinstance(expected, mx.array) else expected
    return float(np.linalg.norm(exact(found) - right) / np.linalg.norm(right))


def rounding(dtype: mx.Dtype) -> float:
    """What is left where only the result is rounded to this type."""
    return {mx.bfloat16: 3e-3, mx.float16: 4e-4, mx.float32: 1e-6}[dtype]


@pytest.mark.parametrize(
    ("slices", "bits", "group", "inputs", "outputs", "dtype"),
    [
        (SPLIT, 4, 64, K, 6, mx.bfloat16),
        pytest.param(COLUMNS, 16, 1, 2064, 9, mx.bfloat16, marks=SLOW),
        pytest.param(COLUMNS, 8, 32, 96, 9, mx.float16, marks=SLOW),
        pytest.param(SPLIT, 4, 32, 96, 33, mx.float16, marks=SLOW),
        pytest.param(SPLIT, 4, 128, 2560, 6, mx.bfloat16, marks=SLOW),  # a lane takes several steps
        pytest.param(COLUMNS, 4, 64, 64, 1, mx.bfloat16, marks=SLOW),  # a single scale: MLX passes it as a constant
        pytest.param(COLUMNS, 4, 32, 2144, 17, mx.float32, marks=SLOW),
        pytest.param(COLUMNS, 4, 128, 640, 9, mx.bfloat16, marks=SLOW),
        pytest.param(SPLIT, 8, 32, 2144, 9, mx.bfloat16, marks=SLOW),
        pytest.param(SPLIT, 8, 64, 2112, 9, mx.bfloat16, marks=SLOW),
        pytest.param(COLUMNS, 8, 64, 576, 9, mx.bfloat16, marks=SLOW),
        pytest.param(COLUMNS, 8, 128, 640, 9, mx.bfloat16, marks=SLOW),
        pytest.param(SPLIT, 8, 128, 2560, 5, mx.float32, marks=SLOW),
        pytest.param(SPLIT, 16, 1, 640, 40, mx.float16, marks=SLOW),
    ],
)
def test_products_are_right_and_a_row_has_the_same_bits_among_any_number(
    slices: int, bits: int, group: int, inputs: int, outputs: int, dtype: mx.Dtype
) -> None:
    weights = random_weights((outputs, inputs), bits, group, dtype)
    x = normal(16, inputs, seed=1, dtype=dtype)
    together = metal_products(x, [weights], slices)[0]
    assert error(together, exact(x) @ dequantised(weights).T) < rounding(dtype)
    for rows in range(1, 16):
        alone = metal_products(x[16 - rows :], [weights], slices)[0]
        assert mx.array_equal(alone, together[16 - rows :]), rows


@pytest.mark.parametrize("slices", [SPLIT, pytest.param(COLUMNS, marks=SLOW)])
def test_layers_that_share_an_input_have_the_bits_of_each_alone(slices: int) -> None:
    several = [random_weights((outputs, K), 4, 64) for outputs in (9, 1, 6)]
    x = normal(2, 2, K, seed=3)
    for found, weights in zip(metal_products(x, several, slices), several, strict=True):
        assert found.shape == (2, 2, weights.outputs)
        assert mx.array_equal(found, metal_products(x, [weights], slices)[0])


def test_weights_that_do_not_fit_are_refused_with_a_reason() -> None:
    layer = nn.Linear(128, 8, bias=False)
    assert metal_refusal(mx.bfloat16, layer, random_weights((8, 128), 4, 64)) is None
    assert metal_refusal(mx.bfloat16, layer, random_weights((8, 128), 16, 1)) is None
    assert metal_refusal(mx.bfloat16, layer, random_weights((8, 128), 3, 64)) == "3 bits in groups of 64"
    assert metal_refusal(mx.float16, layer, random_weights((8, 128), 4, 64)) is not None
    assert metal_refusal(mx.bfloat16, layer, random_weights((8, 24), 16, 1)) is not None
    assert metal_refusal(mx.bfloat16, layer, random_weights((1, 32), 4, 32)) == "fewer than 8 words of weights"
    assert metal_refusal(mx.int32, layer, random_weights((8, 128), 4, 64)) == "activations are int32"
    assert metal_refusal(mx.bfloat16, nn.Linear(128, 8), random_weights((8, 128), 4, 64)) == "it has a bias"


@pytest.mark.parametrize(
    ("own", "slices", "bits", "group", "rows"),
    [
        (False, SPLIT, 4, 32, 8),
        pytest.param(True, COLUMNS, 16, 1, 16, marks=SLOW),
        pytest.param(False, SPLIT, 16, 1, 16, marks=SLOW),
        pytest.param(False, COLUMNS, 8, 32, 16, marks=SLOW),
        pytest.param(True, SPLIT, 4, 64, 16, marks=SLOW),
        pytest.param(False, COLUMNS, 4, 128, 16, marks=SLOW),
        pytest.param(True, SPLIT, 8, 128, 16, marks=SLOW),
        pytest.param(False, SPLIT, 8, 64, 16, marks=SLOW),
        pytest.param(True, COLUMNS, 4, 32, 16, marks=SLOW),
    ],
)
def test_experts_are_chosen_by_index_and_share_their_weights(
    own: bool, slices: int, bits: int, group: int, rows: int
) -> None:
    inputs = 96 if group < 64 else 128
    weights = random_weights((6, 6, inputs), bits, group)
    indices = mx.array([[4, (3 * row) % 4] if row % 3 else [row % 2, 5] for row in range(rows)], mx.uint32)
    assert mx.sum(indices == 4) > PAIR_ROWS  # more than share a read
    x = normal(rows, 2, inputs, seed=4) if own else normal(rows, inputs, seed=4)
    found = metal_experts(x, indices, [weights], slices)[0]
    each = x if own else mx.repeat(x[:, None], 2, 1)
    expected = (dequantised(weights)[np.array(indices)] @ exact(each)[..., None])[..., 0]
    assert error(found, expected) < rounding(mx.bfloat16)
    for count in range(1, rows):
        alone = metal_experts(x[rows - count :], indices[rows - count :], [weights], slices)[0]
        assert mx.array_equal(alone, found[rows - count :]), count


@pytest.mark.parametrize("normed", [True, pytest.param(False, marks=SLOW)])
def test_routing_takes_the_best_experts_and_the_first_of_equals(normed: bool) -> None:
    logits = normal(5, 40, seed=5)
    logits[3] = 0
    indices, scores = metal_route(logits, 3, normed)
    gates = mx.softmax(logits.astype(mx.float32), axis=-1)
    order = mx.argsort(-logits.astype(mx.float32), axis=-1)[:, :3]
    assert mx.array_equal(indices[:3].astype(mx.int32), order[:3].astype(mx.int32))
    assert indices[3].tolist() == [0, 1, 2]
    expected = mx.take_along_axis(gates, indices.astype(mx.int32), axis=-1)
    assert error(scores, expected / expected.sum(axis=-1, keepdims=True) if normed else expected) < 5e-3
    assert all(mx.array_equal(metal_route(logits[i : i + 1], 3, normed)[1][0], scores[i]) for i in range(5))


def test_routing_a_row_of_nan_names_experts_that_exist() -> None:
    logits = mx.full((2, 40), mx.nan, mx.bfloat16)
    logits[1, :2] = mx.array([1, -mx.inf])
    assert metal_route(logits, 3, True)[0].max().item() < 40


@pytest.mark.parametrize("rows", [1, 3])
def test_experts_are_combined(rows: int) -> None:
    parts, scores = normal(rows, 3, 20, seed=6), mx.softmax(normal(rows, 3, seed=7), axis=-1)
    shared, gate = normal(rows, 20, seed=8), normal(rows, 1, seed=9)
    found = metal_combine(parts, scores, shared, gate)
    expected = (exact(parts) * exact(scores)[..., None]).sum(axis=-2) + exact(shared) / (1 + np.exp(-exact(gate)))
    assert error(found, expected) < rounding(mx.bfloat16)


@SLOW
def test_routing_combining_and_norms_are_the_same_among_one_to_sixteen_rows() -> None:
    logits, gate, weight = normal(16, 300, seed=5), normal(16, 1, seed=9), mx.random.uniform(0.5, 1.5, (40,))
    parts, shared, added = normal(16, 4, 40, seed=6), normal(16, 40, seed=8), normal(16, 40, seed=7)
    indices, scores = metal_route(logits, 4, True)
    together = [indices, scores, metal_combine(parts, scores, shared, gate), *metal_norm(shared, added, weight, 1e-6)]
    for rows in range(1, 16):
        some = slice(16 - rows, 16)
        indices, scores = metal_route(logits[some], 4, True)
        alone = [indices, scores, metal_combine(parts[some], scores, shared[some], gate[some])]
        alone += metal_norm(shared[some], added[some], weight, 1e-6)
        assert all(mx.array_equal(a, b[some]) for a, b in zip(alone, together, strict=True)), rows


class Heads(nn.Module):
    """What is needed of an attention layer."""

    def __init__(self, heads: int, kv_heads: int, dim: int, rotated: int):
        super().__init__()
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, dim
        self.q_norm, self.k_norm = nn.RMSNorm(dim, 1e-6), nn.RMSNorm(dim, 1e-6)
        self.k_proj, self.v_proj = (nn.Linear(8, kv_heads * dim, bias=False) for _ in range(2))
        self.rope = nn.RoPE(rotated, base=1e6)


@pytest.mark.parametrize(
    ("dim", "rotated"), [(64, 32), pytest.param(256, 64, marks=SLOW), pytest.param(128, 128, marks=SLOW)]
)
def test_queries_keys_and_values_are_arranged_as_stock_ops_do(dim: int, rotated: int) -> None:
    layer, offset = Heads(4, 2, dim, rotated), mx.array([3, 500], mx.int32)
    layer.q_norm.weight = mx.random.uniform(0.5, 1.5, (dim,))
    both, keys, values = (normal(2, 3, n * dim, seed=i, dtype=mx.float32) for i, n in enumerate((8, 2, 2)))
    described, cached = Attention(layer, 4, 2, gated=True), KV(keys, values, offset)
    expected = Backend().arrange(described, both, keys, values, cached)
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, 1e-6)
    found = metal_arrange(both, keys, values, norms, layer.rope, offset)
    assert error(found.queries, expected.queries) < 2e-5
    assert error(found.keys, expected.keys) < 2e-5
    assert mx.array_equal(found.values, expected.values)
    later = metal_arrange(both[:, 1:], keys[:, 1:], values[:, 1:], norms, layer.rope, offset + 1)
    assert all(mx.array_equal(a, b[:, :, 1:]) for a, b in zip(later, found, strict=True))
    alone = metal_arrange(both[1:, 2:], keys[1:, 2:], values[1:, 2:], norms, layer.rope, offset[1:] + 2)
    assert all(mx.array_equal(a, b[1:, :, 2:]) for a, b in zip(alone, found, strict=True))


@SLOW
def test_a_token_is_arranged_with_the_same_bits_in_windows_of_one_to_sixteen() -> None:
    layer, offset = Heads(6, 2, 64, 32), mx.array([3, 500, 0], mx.int32)
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, 1e-6)
    given = [normal(3, 16, n * 64, seed=i) for i, n in enumerate((12, 2, 2))]
    together = metal_arrange(*given, norms, layer.rope, offset)
    for width in range(1, 16):
        for first in {0, 16 - width}:
            window = [a[:, first : first + width] for a in given]
            alone = metal_arrange(*window, norms, layer.rope, offset + first)
            assert all(
                mx.array_equal(a, b[:, :, first : first + width]) for a, b in zip(alone, together, strict=True)
            )


def test_heads_that_do_not_fit_are_refused_with_a_reason() -> None:
    assert heads_refusal(Heads(4, 2, 64, 32)) is None
    assert heads_refusal(Heads(1, 1, 64, 32)) == "fewer than 2 query heads"
    assert heads_refusal(Heads(3, 2, 64, 32)) == "query heads are no multiple of key heads"
    assert heads_refusal(Heads(4, 2, 48, 32)) is not None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width", "dtype"),
    [
        (3, 1, 64, 5, mx.bfloat16),
        pytest.param(8, 1, 64, 16, mx.bfloat16, marks=SLOW),  # more queries times heads than stock kernels take: 128
        pytest.param(4, 2, 32, 16, mx.bfloat16, marks=SLOW),
        pytest.param(4, 1, 64, 16, mx.bfloat16, marks=SLOW),
        pytest.param(6, 1, 32, 16, mx.float16, marks=SLOW),
        pytest.param(16, 1, 32, 16, mx.bfloat16, marks=SLOW),
        pytest.param(6, 2, 128, 9, mx.float16, marks=SLOW),
        pytest.param(2, 2, 256, 16, mx.bfloat16, marks=SLOW),
    ],
)
def test_attention_is_right_and_a_query_has_the_same_bits_in_any_window(
    heads: int, kv_heads: int, dim: int, width: int, dtype: mx.Dtype
) -> None:
    B, S, scale = 2, 80, dim**-0.5
    queries, gates = (
        normal(B, heads, width, dim, seed=1, dtype=dtype),
        normal(B, width, heads * 2 * dim, seed=2, dtype=dtype),
    )
    keys, values = (normal(B, kv_heads, S, dim, seed=seed, dtype=dtype) for seed in (3, 4))
    offset = mx.array([2, 62], mx.int32)  # the longer one ends in the third piece
    found = metal_attend(queries, gates, keys, values, offset, scale, S)
    seen = np.arange(S) <= (np.array(offset)[:, None] + np.arange(width))[:, None, :, None]
    repeated = [np.repeat(exact(a), heads // kv_heads, axis=1) for a in (keys, values)]
    scores = np.where(seen, scale * exact(queries) @ repeated[0].swapaxes(2, 3), -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = (shares / shares.sum(axis=-1, keepdims=True)) @ repeated[1]  # [B, H, W, D]
    opened = 1 / (1 + np.exp(-exact(gates).reshape(B, width, heads, 2 * dim)[..., dim:]))
    assert error(found, (out.transpose(0, 2, 1, 3) * opened).reshape(B, width, -1)) < rounding(dtype)

    for row in range(B):
        for count in range(1, width + 1):
            last = slice(width - count, width)
            own = slice(row, row + 1)
            first = offset[own] + width - count
            reach = int(first.item()) + count
            # What lies beyond the window is not written yet, and the buffer may be larger.
            beyond = mx.arange(S + 16)[:, None] >= reach
            more = [mx.pad(a[own], [(0, 0), (0, 0), (0, 16), (0, 0)]) for a in (keys, values)]
            more = [mx.where(beyond, mx.nan, a).astype(dtype) for a in more]
            alone = metal_attend(queries[own, :, last], gates[own, last], *more, first, scale, reach)
            assert mx.array_equal(alone, found[own, last]), (row, count)
