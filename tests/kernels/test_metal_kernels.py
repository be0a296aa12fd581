"""The Metal kernels' own source, run on the CPU: against float64, and the bits of a row whatever runs beside it. What
only a Mac can show is listed in `headstart.kernels.metal`."""

from collections.abc import Iterator
from dataclasses import replace

import metal_on_cpu
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from launches import address

from headstart.kernels import Backend
from headstart.kernels.layers import Attention
from headstart.kernels.metal import attention, choice, device, experts, products, tune
from headstart.kernels.metal.attention import heads_refusal, metal_arrange, metal_attend, metal_attend_into
from headstart.kernels.metal.norm import metal_norm
from headstart.kernels.metal.products import metal_products
from headstart.kernels.metal.tune import operations
from headstart.kernels.types import HeadNorms
from headstart.kernels.weights import MatrixWeights
from headstart.state import KV

SLOW = pytest.mark.slow
K = 576  # not the same number of lanes at work in every slice
KERNELS = (device.metal_kernel, products._product_kernel, experts._experts_kernel)


@pytest.fixture
def split_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simdgroups split sums of K inputs."""
    monkeypatch.setattr(products, "LONG", K)


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


def random_weights(
    shape: tuple[int, ...], bits: int, group: int, dtype: mx.Dtype = mx.bfloat16, seed: int = 0
) -> MatrixWeights:
    weight = 0.1 * normal(*shape, seed=sum(shape) + seed, dtype=mx.float32)
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width"),
    [(4, 2, 32, 5), pytest.param(6, 1, 64, 16, marks=SLOW), pytest.param(2, 2, 256, 1, marks=SLOW)],
)
def test_a_window_written_in_place_gives_the_bits_of_separate_kernels(
    heads: int, kv_heads: int, dim: int, width: int
) -> None:
    B, S, scale = 3, 96, dim**-0.5
    layer, offset = Heads(heads, kv_heads, dim, dim // 2), mx.array([0, 30, 75], mx.int32)
    start = offset + mx.array([0, -4, 9], mx.int32)  # images take up fewer positions
    layer.q_norm.weight = mx.random.uniform(0.5, 1.5, (dim,))
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, 1e-6)
    both, keys, values = (normal(B, width, n * dim, seed=i) for i, n in enumerate((2 * heads, kv_heads, kv_heads)))
    cache = [normal(B, kv_heads, S, dim, seed=seed) for seed in (5, 6)]
    made = metal_arrange(both, keys, values, norms, layer.rope, start)
    places = (offset[:, None] + mx.arange(width))[:, None, :, None]
    expected = [mx.put_along_axis(a, places, new, axis=2) for a, new in zip(cache, made[1:], strict=True)]
    out = metal_attend(made.queries, both, *expected, offset, scale, S)
    order = mx.arange(8.0)
    mx.eval(cache, expected, out, order)
    held = [address(a) for a in cache]
    given = both, keys, values, norms, layer.rope, tuple(cache), offset, start, scale, S, order
    found, after = metal_attend_into(*given)
    assert mx.array_equal(found, out)
    assert mx.array_equal(after, order)
    assert [address(a) for a in cache] == held
    assert all(mx.array_equal(a, b) for a, b in zip(cache, expected, strict=True))
    again, _ = metal_attend_into(*given)
    assert mx.array_equal(again, out), "what this window wrote is not read"


@pytest.mark.parametrize(
    ("bits", "kernel", "inputs"),
    [
        (4, "metal", K),
        (4, "metal-matrix", K),
        pytest.param(16, "metal", K // 2, marks=SLOW),
        pytest.param(8, "metal", K // 2, marks=SLOW),
        pytest.param(16, "metal-matrix", K, marks=SLOW),
        pytest.param(4, "metal-tensor", K, marks=SLOW),
    ],
)
def test_a_gated_product_is_right_and_a_row_has_the_same_bits_in_any_number(
    bits: int, kernel: str, inputs: int, split_early: None
) -> None:
    gate = random_weights((18, inputs), bits, 32)
    up = random_weights((18, inputs), bits, 32, seed=1)
    x = normal(7, 1, inputs, seed=3)
    (found,) = metal_products(x, [gate, up], kernel, gated=True)
    first, second = (exact(x) @ dequantised(each).T for each in (gate, up))
    assert error(found, first / (1 + np.exp(-first)) * second) < 3 * rounding(mx.bfloat16)
    for count in (1, 2, 4, 5):
        (alone,) = metal_products(x[7 - count :], [gate, up], kernel, gated=True)
        assert mx.array_equal(alone, found[7 - count :])


@pytest.mark.parametrize(
    ("bits", "kernel", "inputs", "dtype"),
    [
        (4, "metal", K, mx.bfloat16),
        (4, "metal-matrix", K, mx.bfloat16),
        pytest.param(16, "metal", K // 2, mx.float16, marks=SLOW),
        pytest.param(8, "metal", K // 2, mx.bfloat16, marks=SLOW),
        pytest.param(16, "metal", K, mx.bfloat16, marks=SLOW),
        pytest.param(16, "metal-matrix", K, mx.float16, marks=SLOW),
        pytest.param(8, "metal-tensor", K, mx.bfloat16, marks=SLOW),
    ],
)
def test_norm_and_sum_within_a_product_have_the_bits_of_separate_kernels(
    bits: int, kernel: str, inputs: int, dtype: mx.Dtype, split_early: None
) -> None:
    first, second = (random_weights((10 + i, inputs), bits, 32, dtype, seed=i) for i in (0, 1))
    norm, x = 1 + normal(inputs, seed=5, dtype=mx.float32) / 8, normal(7, 1, inputs, seed=3, dtype=dtype)
    (normed,) = metal_norm(x, None, norm, 1e-6)
    apart = metal_products(normed, [first, second], kernel)
    together = metal_products(x, [first, second], kernel, norm=(norm, 1e-6))
    assert all(mx.array_equal(a, b) for a, b in zip(together, apart, strict=True))
    (gated,) = metal_products(x, [first, first], kernel, gated=True, norm=(norm, 1e-6))
    assert mx.array_equal(gated, metal_products(normed, [first, first], kernel, gated=True)[0])
    residual = normal(7, 1, 10, seed=6, dtype=dtype)
    (added,) = metal_products(x, [first], kernel, residual=residual)
    assert mx.array_equal(added, residual + metal_products(x, [first], kernel)[0])
    (alone,) = metal_products(x[5:6], [first], kernel, residual=residual[5:6])
    assert mx.array_equal(alone, added[5:6])


def test_fewer_simdgroups_have_the_same_bits() -> None:
    weights, x = random_weights((33, 288), 4, 32), normal(9, 288, seed=1)
    found, narrower = (metal_products(x, [weights], kernel)[0] for kernel in ("metal-matrix", "metal-matrix-4"))
    assert mx.array_equal(narrower, found)


@pytest.mark.parametrize("other_order", [pytest.param(False, marks=SLOW), True])
def test_a_chip_whose_units_sum_in_another_order_is_found_out(
    other_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One and two rows are then computed in another order than more."""
    monkeypatch.setattr(metal_on_cpu, "FLAGS", [*metal_on_cpu.FLAGS, *["-DOTHER_ORDER=true"] * other_order])
    for name, value in {"TIMED": (1, 4), "REPEATS": 1, "LAUNCHES": 1, "MOST_ROWS": 4, "WIDER": (9,)}.items():
        monkeypatch.setattr(choice, name, value)
    monkeypatch.setattr(choice, "_score", lambda candidate: candidate.name != "metal-matrix")
    for name in ("WIDE_ROWS", "MOST_ROWS"):
        monkeypatch.setattr(tune, name, 17)
    model = nn.Module()
    model.proj = nn.QuantizedLinear(64, 5, bias=False, group_size=32, bits=4)
    (operation,) = operations(model, mx.float32)
    check = choice.decide(replace(operation, forms=1))
    found = next(each for each in check.candidates if each.name == "metal-matrix")
    assert found.exact is not other_order
    assert (check.chosen == "metal-matrix") is not other_order
