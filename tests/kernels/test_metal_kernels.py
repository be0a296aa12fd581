"""The Metal kernels' own source, run on the CPU: against stock ops in float32, and the bits of a row whatever runs
beside it. What only a Mac can show (compile time, speed, the hardware's own rounding) is in docs/apple.md."""

from collections.abc import Iterator

import metal_on_cpu
import mlx.core as mx
import mlx.nn as nn
import pytest
from test_gated_delta import DV, HV, memory, net, none_accepted, part, tokens

from headstart.kernels import metal
from headstart.kernels.gated_delta import Drafts, Ran, Window
from headstart.kernels.gated_delta import Weights as DeltaWeights
from headstart.kernels.metal.attention import metal_arrange, metal_attend
from headstart.kernels.metal.gated_delta import metal_fold_and_run
from headstart.kernels.metal.norm import metal_norm
from headstart.kernels.metal.products import combine, metal_experts, metal_products, metal_refusal, route
from headstart.kernels.products import Weights
from headstart.models.attention import arranged
from headstart.models.gated_delta_net import stock
from headstart.state import Recurrent

pytestmark = pytest.mark.usefixtures("stock_ops")
K = 576  # of 4-bit codes: not the same number of lanes at work in every slice


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", metal_on_cpu.metal_kernel)
        metal.metal_kernel.cache_clear()
        yield
    metal.metal_kernel.cache_clear()


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def random_weights(shape: tuple[int, ...], bits: int, group: int, dtype: mx.Dtype = mx.bfloat16) -> Weights:
    weight = 0.1 * normal(*shape, seed=sum(shape), dtype=mx.float32)
    if bits == 16:
        return Weights(weight.astype(dtype))
    codes, scales, biases = mx.quantize(weight, group, bits)
    return Weights(codes, scales.astype(dtype), biases.astype(dtype), bits, group)


def dequantised(weights: Weights) -> mx.array:
    if weights.scales is None or weights.biases is None:
        return weights.weight.astype(mx.float32)
    scales, biases = weights.scales.astype(mx.float32), weights.biases.astype(mx.float32)
    return mx.dequantize(weights.weight, scales, biases, weights.group, weights.bits)


def error(found: mx.array, expected: mx.array) -> float:
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))


@pytest.mark.parametrize(
    ("bits", "group", "inputs", "outputs", "dtype"),
    [
        (4, 64, K, 50, mx.bfloat16),
        pytest.param(4, 32, 96, 33, mx.float16, marks=pytest.mark.slow),
        pytest.param(4, 128, 2560, 6, mx.bfloat16, marks=pytest.mark.slow),  # a lane takes several steps
        (8, 64, 2112, 9, mx.bfloat16),
        (16, 1, 2064, 5, mx.bfloat16),
        pytest.param(16, 1, 640, 40, mx.float16, marks=pytest.mark.slow),
    ],
)
def test_products_are_right_and_a_row_has_the_same_bits_among_any_number(
    bits: int, group: int, inputs: int, outputs: int, dtype: mx.Dtype
) -> None:
    weights = random_weights((outputs, inputs), bits, group, dtype)
    x = normal(16, inputs, seed=1, dtype=dtype)
    together = metal_products(x, [weights])[0]
    assert error(together, x.astype(mx.float32) @ dequantised(weights).T) < 3e-3
    for rows in (1, 2, 3, 5, 7, 13):
        assert mx.array_equal(metal_products(x[16 - rows :], [weights])[0], together[16 - rows :]), rows


def test_layers_that_share_an_input_have_the_bits_of_each_alone() -> None:
    several = [random_weights((outputs, K), 4, 64) for outputs in (50, 3, 17)]
    x = normal(2, 2, K, seed=3)
    for found, weights in zip(metal_products(x, several), several, strict=True):
        assert found.shape == (2, 2, weights.outputs)
        assert mx.array_equal(found, metal_products(x, [weights])[0])


def test_weights_that_do_not_fit_are_refused_with_a_reason() -> None:
    assert metal_refusal(mx.bfloat16, random_weights((8, 128), 4, 64)) is None
    assert metal_refusal(mx.bfloat16, random_weights((8, 128), 16, 1)) is None
    assert metal_refusal(mx.bfloat16, random_weights((8, 128), 3, 64)) == "3 bits in groups of 64"
    assert metal_refusal(mx.float16, random_weights((8, 128), 4, 64)) is not None
    assert metal_refusal(mx.bfloat16, random_weights((8, 24), 16, 1)) is not None
    assert metal_refusal(mx.int32, random_weights((8, 128), 4, 64)) == "activations are int32"


@pytest.mark.parametrize("own", [False, True], ids=["one input", "an input of its own"])
def test_experts_are_chosen_by_index_and_share_their_weights(own: bool) -> None:
    weights = random_weights((6, 10, 96), 4, 32)
    indices = mx.array([[1, 4], [4, 0], [5, 4], [4, 1], [4, 2], [4, 3]], mx.uint32)  # six rows chose expert 4
    x = normal(6, 2, 96, seed=4) if own else normal(6, 96, seed=4)
    found = metal_experts(x, indices, [weights])[0]
    each = x if own else mx.repeat(x[:, None], 2, 1)
    expected = (dequantised(weights)[indices] @ each.astype(mx.float32)[..., None])[..., 0]
    assert error(found, expected) < 3e-3
    for row in range(6):
        alone = metal_experts(x[row : row + 1], indices[row : row + 1], [weights])[0]
        assert mx.array_equal(alone[0], found[row]), row


@pytest.mark.parametrize("normed", [True, False])
def test_routing_takes_the_best_experts_and_the_first_of_equals(normed: bool) -> None:
    logits = normal(5, 40, seed=5)
    logits[3] = 0
    indices, scores = route(logits, 3, normed)
    gates = mx.softmax(logits.astype(mx.float32), axis=-1)
    order = mx.argsort(-logits.astype(mx.float32), axis=-1)[:, :3]
    assert mx.array_equal(indices[:3].astype(mx.int32), order[:3].astype(mx.int32))
    assert indices[3].tolist() == [0, 1, 2]
    expected = mx.take_along_axis(gates, indices.astype(mx.int32), axis=-1)
    assert error(scores, expected / expected.sum(axis=-1, keepdims=True) if normed else expected) < 5e-3
    assert all(mx.array_equal(route(logits[i : i + 1], 3, normed)[1][0], scores[i]) for i in range(5))


@pytest.mark.parametrize("rows", [1, 3])
def test_experts_are_combined(rows: int) -> None:
    parts, scores = normal(rows, 3, 20, seed=6), mx.softmax(normal(rows, 3, seed=7), axis=-1)
    shared, gate = normal(rows, 20, seed=8), normal(rows, 1, seed=9)
    found = combine(parts, scores, shared, gate)
    single = [a.astype(mx.float32) for a in (parts, scores, shared, gate)]
    expected = (single[0] * single[1][..., None]).sum(axis=-2) + mx.sigmoid(single[3]) * single[2]
    assert error(found, expected) < 5e-3


@pytest.mark.parametrize(("size", "dtype"), [(72, mx.bfloat16), (1000, mx.float32)])
def test_norms_are_right_and_rows_independent(size: int, dtype: mx.Dtype) -> None:
    x, added = normal(3, size, seed=10, dtype=dtype), normal(3, size, seed=11, dtype=dtype)
    weight = mx.random.uniform(0.5, 1.5, (size,))
    total, normed = metal_norm(x, added, weight, 1e-6)
    assert mx.array_equal(total, x + added)
    expected = mx.fast.rms_norm((x + added).astype(mx.float32), weight, 1e-6)
    assert error(normed, expected) < (4e-3 if dtype == mx.bfloat16 else 1e-6)
    assert mx.array_equal(metal_norm(x + added, None, weight, 1e-6)[0], normed)
    assert mx.array_equal(metal_norm(x[1:2], added[1:2], weight, 1e-6)[1], normed[1:2])


class Heads(nn.Module):
    """What `arranged` needs of an attention layer."""

    def __init__(self, heads: int, kv_heads: int, dim: int, rotated: int):
        super().__init__()
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, dim
        self.q_norm, self.k_norm = nn.RMSNorm(dim, 1e-6), nn.RMSNorm(dim, 1e-6)
        self.rope = nn.RoPE(rotated, base=1e6)


def test_queries_keys_and_values_are_arranged_as_stock_ops_do() -> None:
    layer, offset = Heads(4, 2, 64, 32), mx.array([3, 500], mx.int32)
    layer.q_norm.weight = mx.random.uniform(0.5, 1.5, (64,))
    both, keys, values = (normal(2, 3, size, seed=size, dtype=mx.float32) for size in (512, 128, 129))
    values = values[..., :128]
    expected = arranged(layer, both, keys, values, offset)
    weights = layer.q_norm.weight, layer.k_norm.weight
    found = metal_arrange(both, keys, values, *weights, 1e-6, 32, 1e6, offset)
    assert error(found[0], expected.queries) < 2e-5
    assert error(found[1], expected.keys) < 2e-5
    assert mx.array_equal(found[2], expected.values)
    later = metal_arrange(both[:, 1:], keys[:, 1:], values[:, 1:], *weights, 1e-6, 32, 1e6, offset + 1)
    assert all(mx.array_equal(a, b[:, :, 1:]) for a, b in zip(later, found, strict=True))


def test_attention_is_right_and_a_query_has_the_same_bits_in_any_window() -> None:
    B, H, Hkv, W, D, S = 2, 4, 2, 5, 64, 48
    queries, gates = normal(B, H, W, D, seed=1), normal(B, W, H * 2 * D, seed=2)
    keys, values = normal(B, Hkv, S, D, seed=3), normal(B, Hkv, S, D, seed=4)
    offset = mx.array([2, 40], mx.int32)
    found = metal_attend(queries, gates, keys, values, offset, 0.125)
    mask = mx.arange(S) <= (offset[:, None] + mx.arange(W))[:, None, :, None]
    single = [a.astype(mx.float32) for a in (queries, keys, values)]
    out = mx.fast.scaled_dot_product_attention(*single, scale=0.125, mask=mask)
    opened = mx.sigmoid(gates.astype(mx.float32).reshape(B, W, H, 2 * D)[..., D:])
    assert error(found, (out.transpose(0, 2, 1, 3) * opened).reshape(B, W, -1)) < 4e-3
    for width in (1, 2, 3):
        last = slice(W - width, W)
        more = [mx.pad(a, [(0, 0), (0, 0), (0, 16), (0, 0)]) for a in (keys, values)]  # a larger buffer
        alone = metal_attend(
            queries[1:, :, last], gates[1:, last], *[a[1:] for a in more], offset[1:] + W - width, 0.125
        )
        assert mx.array_equal(alone[0], found[1, last]), width


def delta(window: Window, kept: Recurrent, accepted: mx.array, certain: int) -> mx.array:
    layer = net(window.qkv.dtype)
    weights = DeltaWeights(layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.norm.weight, layer.norm.eps)
    pending = Drafts(*kept.pending.arrays()) if kept.pending is not None else None
    ran: Ran = metal_fold_and_run(window, weights, kept.state, kept.conv, pending, accepted, certain)
    kept.hold([ran.state, ran.conv, *(ran.drafts or ())])
    return ran.y


def test_gated_delta_with_ragged_acceptance_is_what_the_stock_ops_make() -> None:
    ours, theirs = memory(2), memory(2)
    for seed, (width, certain, accepted) in enumerate(
        [(4, 1, (0, 0)), (9, 1, (3, 1)), (1, 1, (8, 0)), (11, 11, (0, 0))]
    ):
        window = tokens(width, 2, seed)
        found = delta(window, ours, mx.array(accepted, mx.int32), certain)
        expected = stock(net(), window, theirs, mx.array(accepted, mx.int32), certain)
        assert error(found, expected) < 1e-6
        assert error(ours.state, theirs.state) < 1e-6
        assert mx.array_equal(ours.conv, theirs.conv)
        if theirs.pending is not None and ours.pending is not None:
            pairs = zip(ours.pending.arrays(), theirs.pending.arrays(), strict=True)
            assert all(error(a, b) < 1e-6 for a, b in pairs)


@pytest.mark.parametrize("dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.slow)])
def test_a_window_of_gated_delta_has_the_bits_of_its_tokens_one_by_one(dtype: mx.Dtype) -> None:
    width = 10
    text = tokens(width, dtype=dtype)
    together, alone = memory(dtype=dtype), memory(dtype=dtype)
    found = delta(text, together, none_accepted(), 1)
    ys = [delta(part(text, t, t + 1), alone, none_accepted(), 1) for t in range(width)]
    assert mx.array_equal(found, mx.concatenate(ys, axis=1))
    # Folding the accepted drafts of the window gives the state of the tokens one by one.
    following = tokens(1, seed=9, dtype=dtype)
    delta(following, together, mx.array([width - 1], mx.int32), 1)
    delta(following, alone, none_accepted(), 1)
    assert mx.array_equal(together.state, alone.state)
    assert found.shape == (1, width, HV, DV)
