"""The CPU kernels against stock ops and float64, alone and in company, and compiled for other CPUs than this one."""

import platform
import subprocess
import sys
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import no_mask, nothing, run_window

from fixtures import random_model
from headstart.kernels import Backend, choose_backend
from headstart.kernels.cpu import build, load, ops
from headstart.kernels.cpu.attention import Heads
from headstart.kernels.cpu.backend import CpuBackend, StockCpu
from headstart.kernels.layers import Attention, Pass
from headstart.kernels.types import Window
from headstart.models.mixers import gated_delta_net
from headstart.state import KV, Recurrent

TYPES = ("bfloat16", "float32")
CPU = choose_backend()
pytestmark = pytest.mark.skipif(not isinstance(CPU, CpuBackend), reason="no CPU kernels here")


def native() -> Any:
    assert isinstance(CPU, CpuBackend)
    return CPU.native


def normal(seed: int, *shape: int, dtype: str = "float32", scale: float = 1.0) -> mx.array:
    values = scale * np.random.default_rng(seed).normal(size=shape)
    return mx.array(values.astype(np.float32)).astype(getattr(mx, dtype))


def exact(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def ulp(dtype: str) -> float:
    return 2.0**-8 if dtype == "bfloat16" else 2.0**-20


def multiply(
    module: Any, x: mx.array, layers: list[list[mx.array]], bits: int = 0, group: int = 0, **options: Any
) -> list[mx.array]:
    """Products with layers given as their arrays: weights, or codes, scales and biases."""
    made: list[mx.array] = module.products(
        x, [(arrays[0], *(arrays[1:] or (None, None)), bits, group, None, None) for arrays in layers], **options
    )
    return made


# --- Products and SwiGLU


def quantised(bits: int, group: int, dtype: str, *shape: int) -> tuple[list[mx.array], np.ndarray]:
    """Weights as a layer holds them, and what they stand for."""
    arrays = list(mx.quantize(normal(bits, *shape, dtype=dtype), group, bits))
    wide = [arrays[0], *(array.astype(mx.float32) for array in arrays[1:])]
    return arrays, exact(mx.dequantize(*wide, group, bits))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="weights must be"):
        multiply(native(), mx.ones((2, 8)), [[mx.ones((4, 9))]])
    with pytest.raises(ValueError, match="type of the input"):
        multiply(native(), mx.ones((2, 8)), [[mx.ones((4, 8), mx.bfloat16)]])
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        multiply(native(), mx.ones((2, 8), mx.float16), [[mx.ones((4, 8), mx.float16)]])


# --- GatedDeltaNet


@cache
def net(dtype: str) -> nn.Module:
    """A layer with two key heads and four value heads of 32, whose decays are of all sizes."""
    layer = random_model("dense", seed=TYPES.index(dtype) + 90).weights.layers[0].linear_attn
    layer.set_dtype(getattr(mx, dtype))
    layer.A_log = normal(5, layer.num_v_heads)
    layer.dt_bias = normal(6, layer.num_v_heads)
    return layer


def window(layer: nn.Module, rows: int, width: int, dtype: str, seed: int = 1) -> Window:
    Hv, Dv = layer.num_v_heads, layer.head_v_dim
    return Window(
        normal(seed, rows, width, layer.conv_dim, dtype=dtype),
        normal(seed + 1, rows, width, Hv, Dv, dtype=dtype),
        normal(seed + 2, rows, width, Hv, dtype=dtype),
        normal(seed + 3, rows, width, Hv, dtype=dtype),
    )


def blank(layer: nn.Module, rows: int, dtype: str) -> Recurrent:
    memory = Recurrent.empty(
        rows,
        layer.num_v_heads,
        layer.head_v_dim,
        layer.head_k_dim,
        layer.conv_kernel_size,
        layer.conv_dim,
        getattr(mx, dtype),
    )
    memory.state = normal(9, *memory.state.shape)
    memory.conv = normal(10, *memory.conv.shape, dtype=dtype)
    return memory


def none(rows: int) -> mx.array:
    return mx.zeros((rows,), mx.int32)


# --- Attention


@cache
def attending(dtype: str) -> nn.Module:
    model = random_model("dense", seed=TYPES.index(dtype) + 90)
    layer = next(layer for layer in model.weights.layers if not layer.is_linear).self_attn
    norms = [mx.array(layer.q_norm.weight), mx.array(layer.k_norm.weight)]
    layer.set_dtype(getattr(mx, dtype))
    layer.q_norm.weight, layer.k_norm.weight = norms
    return layer


def cached(layer: nn.Module, lengths: list[int], capacity: int, dtype: str) -> KV:
    """Keys and values of every position up to a length; NaN behind it, which nobody may read."""
    shape = (len(lengths), layer.num_key_value_heads, capacity, layer.head_dim)
    seen = mx.arange(capacity)[None, None, :, None] < mx.array(lengths)[:, None, None, None]
    k, v = (mx.where(seen, normal(n, *shape), mx.nan).astype(getattr(mx, dtype)) for n in (7, 8))
    return KV(k, v, mx.array(lengths, mx.int32), reach=capacity)


def attention(
    backend: Backend, layer: nn.Module, x: mx.array, memory: KV, last: mx.array | None = None, mask: Any = no_mask
) -> mx.array:
    described = Attention(layer, layer.num_attention_heads, layer.num_key_value_heads, gated=True)
    run = Pass(mask, none(x.shape[0]), last=last)
    return backend.attention(described, x, memory, run, nothing(x if last is None else x[:, :1]))[0]


def masked(lengths: list[int], width: int, capacity: int) -> mx.array:
    own = mx.array(lengths)[:, None] + mx.arange(width)
    return (mx.arange(capacity) <= own[..., None])[:, None]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "longest"), [(1, 1500), (3, 70), (4, 1020), (9, 70), (40, 70), (40, 1000)])
def test_attention_is_stock(dtype: str, width: int, longest: int) -> None:
    lengths, capacity = [0, longest, 21], longest + 58
    layer = attending(dtype)
    x = normal(3, 3, width, layer.q_proj.weight.shape[1], dtype=dtype)
    mask, ours, theirs = (
        masked(lengths, width, capacity),
        *(cached(layer, lengths, capacity, dtype) for _ in range(2)),
    )
    theirs.keys, theirs.values = (mx.where(mx.isnan(a), 0, a) for a in theirs.arrays())
    found = attention(CPU, layer, x, ours)
    again, last = cached(layer, lengths, capacity, dtype), mx.array([0, width - 1, 0], mx.int32)
    asked = attention(CPU, layer, x, again, last)
    expected = attention(StockCpu(), layer, x, theirs, mask=lambda window: mask)
    tolerance = {"rtol": 0.05, "atol": 0.03} if dtype == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(exact(found), exact(expected), **tolerance)
    for mine, true in zip(ours.arrays(), theirs.arrays(), strict=True):
        np.testing.assert_allclose(exact(mx.where(mx.isnan(mine), 0, mine)), exact(true), **tolerance)
    at = mx.array([0, width - 1, 0])
    assert mx.array_equal(asked, mx.take_along_axis(found, at[:, None, None], axis=1))


@pytest.mark.parametrize("dtype", TYPES)
def test_attention_is_that_of_float64(dtype: str) -> None:
    """Norms, rotation and gates included, over more positions than a split has and more queries than a tile."""
    layer, lengths, width, scale = attending(dtype), [1000, 3], 45, 0.1
    H, Hkv, D = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    kv = cached(layer, lengths, 1050, dtype)
    past = [exact(mx.where(mx.isnan(array), 0, array)) for array in kv.arrays()]
    q, k, v = (normal(n, 2, width, n * D, dtype=dtype) for n in (2 * H, Hkv, Hkv))
    turns = mx.array([10000.0 ** (-i / 8) for i in range(8)])
    norms = [layer.q_norm.weight, layer.k_norm.weight]
    heads = Heads(H, Hkv, scale, 1e-6, *norms, turns)
    found, keys, values = native().attention(q, k, v, None, heads, kv.arrays(), kv.offset)

    def turned(x: np.ndarray, weight: mx.array, start: int) -> np.ndarray:
        """The norms [heads, W, D] of x, rotated in their first 16 elements."""
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * exact(weight)
        angles = (start + np.arange(width))[:, None] * exact(turns)
        a, b = x[..., :8], x[..., 8:16]
        both = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
        return np.concatenate([*both, x[..., 16:]], axis=-1)

    for row, length in enumerate(lengths):
        split = exact(q[row]).reshape(width, H, 2, D).transpose(2, 1, 0, 3)  # queries and gates, [H, W, D]
        new = [exact(array[row]).reshape(width, Hkv, D).transpose(1, 0, 2) for array in (k, v)]
        every = [np.concatenate([each[row, :, :length], one], axis=1) for each, one in zip(past, new, strict=True)]
        every[0][:, length:] = turned(new[0], norms[1], length)
        for array, expected in ((keys, every[0]), (values, every[1])):
            tolerance = {"rtol": 2 * ulp(dtype), "atol": 1e-4}
            np.testing.assert_allclose(exact(array[row, :, : length + width]), expected, **tolerance)
        wide = [np.repeat(each, H // Hkv, axis=0) for each in every]
        scores = scale * turned(split[0], norms[0], length) @ wide[0].transpose(0, 2, 1)
        scores[:, np.arange(width)[:, None] + length < np.arange(length + width)] = -np.inf
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        expected = chances / chances.sum(-1, keepdims=True) @ wide[1] / (1 + np.exp(-split[1]))
        expected = expected.transpose(1, 0, 2).reshape(width, H * D)
        tolerance = {"rtol": 4 * ulp(dtype), "atol": 8e-3 if dtype == "bfloat16" else 1e-5}
        np.testing.assert_allclose(exact(found[row]), expected, **tolerance)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("longest", "width"), [(33, 9), (1010, 70)])
def test_a_query_is_the_same_alone_and_in_a_window(dtype: str, longest: int, width: int) -> None:
    """Also where its positions are more than a split, and queries more than a tile."""
    lengths, capacity = [longest, 5], longest + 80
    layer = attending(dtype)
    x = normal(3, 2, width, layer.q_proj.weight.shape[1], dtype=dtype)
    together = cached(layer, lengths, capacity, dtype)
    found = attention(CPU, layer, x, together)
    for row, length in enumerate(lengths):
        alone = cached(layer, lengths, 2 * capacity, dtype)
        alone.keep(mx.array([row]), 2 * capacity)
        alone.keys[:, :, :length] = together.keys[row : row + 1, :, :length]
        alone.values[:, :, :length] = together.values[row : row + 1, :, :length]
        for w, end in pairwise([*range(min(width, 20)), *range(20, width + 1, 5)]):
            alone.offset = mx.array([length + w], mx.int32)
            tokens = x[row : row + 1, w:end]
            few = attention(CPU, layer, tokens, alone)
            assert mx.array_equal(few, found[row : row + 1, w:end]), (row, w)


def test_a_cache_is_written_in_place_only_where_nobody_else_has_it() -> None:
    layer = attending("float32")
    memory = cached(layer, [3], 64, "float32")
    mx.eval(memory.arrays())
    held, before = memory.keys, np.array(memory.keys)
    x = normal(3, 1, 2, layer.q_proj.weight.shape[1])
    mx.eval(attention(CPU, layer, x, memory), memory.arrays())
    np.testing.assert_array_equal(before, np.array(held))
    assert not np.isnan(np.array(memory.keys)[0, :, :5]).any()


def test_a_cache_and_a_state_that_nobody_else_has_are_written_in_place() -> None:
    """Or every step would copy all of them. Whoever has an array too is found by counting its owners in MLX."""
    layer, x = attending("float32"), normal(3, 1, 2, attending("float32").q_proj.weight.shape[1])
    memory = cached(layer, [3], 64, "float32")
    mx.eval(memory.arrays())
    places = [address(array) for array in memory.arrays()]
    mx.eval(attention(CPU, layer, x, memory), memory.arrays())
    assert [address(array) for array in memory.arrays()] == places
    recurrent = blank(net("float32"), 1, "float32")
    mx.eval(recurrent.arrays())
    place = address(recurrent.state)
    mx.eval(run_window(CPU, net("float32"), window(net("float32"), 1, 3, "float32"), recurrent, none(1), 1))
    assert address(recurrent.state) == place


def address(array: mx.array) -> int:
    return int(np.asarray(memoryview(array)).ctypes.data)  # type: ignore[arg-type]


# --- Scales in float16, and results in float32


def in_float16(bits: int, group: int, *shape: int) -> list[mx.array]:
    codes, *others = mx.quantize(normal(bits, *shape), group, bits)
    return [codes, *(mx.contiguous(each.astype(mx.float16)) for each in others)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_scales_in_float16_are_multiplied_as_they_are(bits: int, dtype: str) -> None:
    x, (codes, *others) = normal(1, 5, 288, dtype=dtype), in_float16(bits, 32, 43, 288)
    narrow = multiply(native(), x, [[codes, *others]], bits, 32)
    wide = multiply(native(), x, [[codes, *(each.astype(mx.float32) for each in others)]], bits, 32)
    assert mx.array_equal(narrow[0], wide[0])


def test_an_embedding_with_scales_in_float16_is_what_its_codes_stand_for() -> None:
    """In float16 it would be rounded."""
    embedding = nn.Embedding(40, 64).to_quantized(32, 8)
    embedding.weight, embedding.scales, embedding.biases = in_float16(8, 32, 40, 64)
    wide = embedding.scales.astype(mx.float32), embedding.biases.astype(mx.float32)
    expected = mx.dequantize(embedding.weight, *wide, 32, 8)[mx.array([[3, 39]])]
    assert mx.array_equal(CPU.embed(mx.array([[3, 39]]), embedding, mx.float32), expected)


def test_logits_are_not_rounded() -> None:
    """Candidates that are nearer to each other than bfloat16 can tell keep their order."""
    layer, hidden = nn.Linear(64, 300, bias=False), normal(4, 1, 3, 64, dtype="bfloat16")
    layer.weight = normal(5, 300, 64, dtype="bfloat16")
    logits = CPU.logits(hidden, layer)
    assert logits.dtype == mx.float32
    assert mx.array_equal(logits.astype(mx.bfloat16), CPU.product(hidden, layer))
    np.testing.assert_allclose(exact(logits), exact(hidden) @ exact(layer.weight).T, rtol=1e-5, atol=1e-4)


# --- Whole parts of a layer


def part_of_layer(family: str, dtype: str) -> nn.Module:
    """A layer with GatedDeltaNet and an MLP or a mixture of experts."""
    model = random_model(family, seed=TYPES.index(dtype) + 80)
    layer: nn.Module = model.weights.layers[0]
    layer.set_dtype(getattr(mx, dtype))
    return layer


def test_the_first_of_equal_experts_is_chosen_and_scores_are_a_softmax() -> None:
    """Experts that return their own number show which were chosen: routers alone are not a function in Python."""
    E, H, top = 6, 32, 2
    say = mx.zeros((E, H, H))
    identity = (mx.eye(H), None, None, 0, 0, None, None)
    zero, one = (mx.zeros((H, H)), None, None, 0, 0, None, None), (mx.zeros((1, H)), None, None, 0, 0, None, None)
    up = mx.broadcast_to(mx.eye(H), (E, H, H)) * mx.arange(1, E + 1).reshape(E, 1, 1)
    gate = say + mx.eye(H) * 30  # silu(30) is 30
    down = mx.broadcast_to(mx.eye(H), (E, H, H)) / 30
    experts = [(mx.contiguous(a), None, None, 0, 0, None, None) for a in (gate, up, down)]
    x = mx.ones((1, 1, H))
    for logits, expected in (([1, 1, 1, 1, 1, 1], (1 + 2) / 2), ([0, 0, 5, 0, 5, 0], (3 + 5) / 2)):
        router = (mx.broadcast_to(mx.array(logits, mx.float32)[:, None] / H, (E, H)), None, None, 0, 0, None, None)
        (made,) = native().mixture(x, [router, one], [zero, zero, identity], experts, top, True)
        np.testing.assert_allclose(np.array(made), expected, rtol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_chained_layer_has_the_bits_of_its_kernels_one_by_one(dtype: str) -> None:
    layer = part_of_layer("dense", dtype).linear_attn
    described, x = gated_delta_net(layer), normal(3, 2, 4, layer.in_proj_qkv.weight.shape[1], dtype=dtype)
    chained, single = blank(layer, 2, dtype), blank(layer, 2, dtype)
    for count in ([0, 0], [3, 1]):
        accepted = mx.array(count, mx.int32)
        found, _ = CPU.gated_delta_net(described, x, chained, Pass(no_mask, accepted), nothing(x))
        projected = described.window(layer, CPU.products(x, described.projections))
        y = run_window(CPU, layer, projected, single, accepted, 1)
        assert mx.array_equal(found, CPU.product(y.reshape(2, 4, -1), layer.out_proj))
        assert mx.array_equal(chained.state, single.state)
        assert mx.array_equal(chained.conv, single.conv)


def test_a_layer_that_does_not_fit_is_called_as_it_is() -> None:
    """Layers that are on several machines are other kinds."""

    class Twice(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    x, layer = normal(1, 4, 256), Twice(256, 64, bias=False)
    assert ops.linear(layer, x.dtype) is None
    assert mx.array_equal(CPU.product(x, layer), layer(x))


# --- Every CPU


VARIANTS = {"portable": ["-DHEADSTART_PORTABLE"]}
if platform.machine() == "x86_64":
    VARIANTS["avx2"] = ["-march=haswell"]


@cache
def variant(name: str) -> Any:
    module = load.open_module(str(build.extension(VARIANTS[name])))
    module.set_threads(2)  # type: ignore[attr-defined]
    return module


MLP = ((1, (70, 390)), (2, (70, 390)), (3, (390, 70)))


def everything(module: Any, dtype: str) -> list[mx.array]:
    """What a module makes of the same inputs, of sizes that leave rests everywhere."""
    x = normal(1, 11, 390, dtype=dtype)
    weights = [[normal(n, n, 390, dtype=dtype, scale=0.05)] for n in (8, 130, 37)]
    made = [*multiply(module, x, weights), *multiply(module, x, [weights[1], weights[1]], gated=True)]
    for mode, bits, group in (("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)):
        codes = mx.quantize(normal(bits, 21, 352), group, bits, mode=mode)
        made += multiply(module, x[:, :352], [[*codes, None]], bits, group, wide=True)
    for bits in (1, 2, 3, 4, 5, 6, 8):
        made += multiply(module, x[:, :384], [quantised(bits, 32, dtype, 21, 384)[0]], bits, 32)
        made += multiply(module, x[:, :352], [in_float16(bits, 32, 21, 352)], bits, 32, wide=True)
    made += module.norm(x, normal(2, 390), 1e-6, x * x)
    gate, up, down = ((normal(n, *shape, dtype=dtype, scale=0.05), None, None, 0, 0, None, None) for n, shape in MLP)
    residual = (normal(9, 11, 390, dtype=dtype), normal(10, 390), 1e-6)
    made += module.mlp(x, [gate, up, down], residual)
    router, one = ((normal(n, n, 390, dtype=dtype), None, None, 0, 0, None, None) for n in (6, 1))
    experts = [(normal(n, 6, *shape, dtype=dtype, scale=0.05), None, None, 0, 0, None, None) for n, shape in MLP]
    made += module.mixture(x, [router, one], [gate, up, down], experts, 3, True, residual)
    layer, accepted = net(dtype), mx.array([2, 0], mx.int32)
    small = [layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.norm.weight]
    memory = blank(layer, 2, dtype)
    y, state, conv, *pending = module.gated_delta(
        list(window(layer, 2, 5, dtype)), small, 1e-6, memory.state, memory.conv, accepted, [], 1
    )
    made += [y, state, conv, *pending]
    made += module.gated_delta(
        list(window(layer, 2, 41, dtype, seed=30)), small, 1e-6, state, conv, accepted, pending, 41
    )
    attends, kv = attending(dtype), cached(attending(dtype), [1000, 3], 1050, dtype)
    H, Hkv, D = attends.num_attention_heads, attends.num_key_value_heads, attends.head_dim
    q, k, v = (normal(n, 2, 45, n * D, dtype=dtype) for n in (2 * H, Hkv, Hkv))
    turns = mx.array([10000.0 ** (-i / 8) for i in range(8)])
    heads = Heads(H, Hkv, 0.1, 1e-6, attends.q_norm.weight, attends.k_norm.weight, turns)
    out, keys, values = module.attention(q, k, v, None, heads, kv.arrays(), kv.offset * 1000 // 1000)
    return [*made, out, *(mx.where(mx.isnan(a), 0, a) for a in (keys, values))]


@pytest.mark.slow  # three minutes of the compiler; test_cpu_portability.py has the lanes they consist of
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_other_cpus_compute_the_same_bits(name: str, dtype: str) -> None:
    assert variant(name).isa() == name
    for mine, other in zip(everything(native(), dtype), everything(variant(name), dtype), strict=True):
        assert mx.array_equal(mine, other)


# --- Threads


def test_threads_change_no_bit() -> None:
    """One thread, and three threads with more parts than threads."""
    code = """
import importlib.machinery, importlib.util, sys
import mlx.core as mx
loader = importlib.machinery.ExtensionFileLoader("headstart_cpu", sys.argv[1])
module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
loader.exec_module(module)  # as `load` does, without the seconds that it takes to import mlx-lm
x, w = mx.arange(3 * 200).reshape(3, 200) / 7.0, mx.arange(900 * 200).reshape(900, 200) / 3e5
one = module.products(x, [(w, None, None, 0, 0, None, None)])[0].tolist()
def attend():
    q, k, v = (mx.random.normal((1, 4, n * 32), key=mx.random.key(n)) for n in (8, 2, 2))
    keys, values = (mx.random.normal((1, 2, 1600, 32), key=mx.random.key(n)) for n in (3, 4))
    ones, offset = mx.ones(32), mx.array([1500], mx.int32)
    heads = (4, 2, 0.5, 1e-6, ones, ones, ones[:8], False, 1.0, 1.0, None, None, 0)
    return module.attention(q, k, v, None, heads, [keys, values], offset)[0].tolist()
alone = attend()
module.set_threads(3)
assert module.threads() == 3
for _ in range(200):
    assert module.products(x, [(w, None, None, 0, 0, None, None)])[0].tolist() == one
assert attend() == alone
"""
    subprocess.run([sys.executable, "-c", code, str(build.extension())], check=True, timeout=600)


def test_operations_work_inside_a_compiled_function() -> None:
    x, w = normal(1, 3, 64), normal(2, 16, 64)
    compiled = mx.compile(lambda x: multiply(native(), mx.exp(x), [[w]])[0] + 1)
    np.testing.assert_array_equal(np.array(compiled(x)), np.array(multiply(native(), mx.exp(x), [[w]])[0] + 1))


@pytest.mark.parametrize("experts", [False, True])
def test_adapters_add_to_the_rows_of_their_sequences_alone(experts: bool) -> None:
    B, W, K, N, E, ranks = 4, 3, 96, 40, 5, (3, 8)
    x, index = normal(1, B, W, K), mx.random.randint(0, E, (B, W, 2), key=mx.random.key(2)).astype(mx.uint32)
    weight = normal(3, E, N, K) if experts else normal(3, N, K)
    count = E if experts else 1
    down, up = normal(4, 2, count, max(ranks), K), normal(5, 2, count, max(ranks), N)
    down, up = (mx.where(mx.arange(8)[:, None] < mx.array(ranks)[:, None, None, None], a, 0) for a in (down, up))
    flat = down.reshape(-1, 8, K), up.reshape(-1, 8, N)

    def products(slots: list[int] | None, rows: slice = slice(None)) -> mx.array:
        added = None if slots is None else (*flat, mx.array(slots, mx.int32), ranks)
        given = {"experts": index[rows]} if experts else {}
        made: mx.array = native().products(x[rows], [(weight, None, None, 0, 0, None, added)], **given)[0]
        return made

    base, slots = products(None), [1, -1, 0, 1]
    found = products(slots)
    for b, slot in enumerate(slots):
        assert mx.array_equal(found[b : b + 1], products([slot], slice(b, b + 1)))
        if slot < 0:
            assert mx.array_equal(found[b], base[b])
            continue
        which = index[b] if experts else mx.zeros((W, 1), mx.uint32)
        low = (x[b][:, None, None, :] @ down[slot][which].swapaxes(-1, -2)) @ up[slot][which]
        expected = low.squeeze(-2) if experts else low.squeeze((-3, -2))
        assert mx.abs(found[b] - base[b] - expected).max() < 1e-4 * mx.abs(expected).max()
