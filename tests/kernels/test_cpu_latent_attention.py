"""Latent attention of the CPU kernels against stock ops, alone and in company."""

from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import nothing
from mlx_lm.models.deepseek_v3 import DeepseekV3Attention
from test_cpu_kernels import CPU, TYPES

from headstart.kernels import Backend
from headstart.kernels.cpu.backend import CpuBackend, StockCpu
from headstart.kernels.layers import LatentAttention, Pass
from headstart.state import KV, BatchState

SIZES = {"hidden_size": 96, "num_attention_heads": 20, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 32}
LENGTHS, CAPACITY = [600, 3], 700
pytestmark = pytest.mark.skipif(not isinstance(CPU, CpuBackend), reason="no CPU kernels here")


@cache
def layer(dtype: str, q_lora_rank: int | None = 64, bits: int = 0) -> nn.Module:
    more = {"qk_nope_head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": None}
    mx.random.seed(3)
    made: nn.Module = DeepseekV3Attention(
        SimpleNamespace(**SIZES, **more, q_lora_rank=q_lora_rank, attention_bias=bool(bits))
    )
    made.kv_a_layernorm.weight = mx.random.normal((64,))
    made.set_dtype(getattr(mx, dtype))
    if bits:
        nn.quantize(made, group_size=32, bits=bits)
    return made


def cached(dtype: str, eight_bits: bool = False) -> KV:
    kv = KV.empty(len(LENGTHS), 1, 64, getattr(mx, dtype), 32, eight_bits=eight_bits)
    kv.grow(CAPACITY)
    kv.reach = CAPACITY
    keys, values = (mx.random.normal((2, 1, CAPACITY, size), key=mx.random.key(size)) for size in (64, 32))
    kv.update_and_fetch(keys.astype(getattr(mx, dtype)), values.astype(getattr(mx, dtype)))
    kv.offset = mx.array(LENGTHS, mx.int32)
    return kv


def inputs(dtype: str, width: int) -> mx.array:
    return mx.random.normal((2, width, 96), key=mx.random.key(width)).astype(getattr(mx, dtype))


def run(
    made: nn.Module,
    x: mx.array,
    kv: KV,
    last: mx.array | None = None,
    *,
    backend: Backend = CPU,
    scales: tuple[float, float] = (1.0, 1.0),
) -> mx.array:
    state = BatchState([kv], kv.offset, mx.zeros_like(kv.offset), [CAPACITY - x.shape[1]])
    one_pass = Pass(state.reserve(x.shape[1]), state.accepted, last=last)
    residual = nothing(x if last is None else x[:, :1])
    return backend.latent_attention(LatentAttention(made, *scales), x, kv, one_pass, residual)[0]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}, {"bits": 4}], ids=str)
def test_latent_attention_is_stock(dtype: str, options: dict[str, Any]) -> None:
    made, x, ours, theirs = layer(dtype, **options), inputs(dtype, 40), cached(dtype), cached(dtype)
    wide = deepcopy(made)
    wide.set_dtype(mx.float32)  # stock ops round to bfloat16 more often than ours
    theirs.keys, theirs.values = (a.astype(mx.float32) for a in theirs.arrays())
    found = run(made, x, ours, scales=(0.8, 1.3))
    expected = run(wide, x.astype(mx.float32), theirs, scales=(0.8, 1.3), backend=StockCpu())
    assert mx.abs(found - expected).max() < (0.03 if dtype == "bfloat16" else 2e-5) * mx.abs(expected).max()
    for mine, true in zip(ours.arrays(), theirs.arrays(), strict=True):
        np.testing.assert_allclose(
            np.array(mine.astype(mx.float32)), np.array(true.astype(mx.float32)), rtol=0.03, atol=1e-2
        )


@pytest.mark.parametrize("dtype", TYPES)
def test_latent_attention_over_eight_bits_is_that_over_what_these_stand_for(dtype: str) -> None:
    made, x, ours, theirs = layer(dtype), inputs(dtype, 9), cached(dtype, eight_bits=True), cached(dtype)
    found = run(made, x, ours)
    codes, scales = ours.arrays()[:2], ours.arrays()[2:]
    wide = [
        c.astype(mx.float32) * mx.repeat(s.astype(mx.float32), 32, axis=-1)
        for c, s in zip(codes, scales, strict=True)
    ]
    theirs.keys, theirs.values = (a.astype(getattr(mx, dtype)) for a in wide)
    expected = run(made, x, theirs)  # its own tokens are not rounded to eight bits
    assert mx.abs(found - expected).max() < 0.05 * mx.abs(expected).max()
    assert not mx.array_equal(found, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_query_is_the_same_alone_and_in_a_window(eight_bits: bool, dtype: str) -> None:
    made, x, together = layer(dtype, bits=4), inputs(dtype, 30), cached(dtype, eight_bits)
    found = run(made, x, together)
    asked = run(made, x, cached(dtype, eight_bits), mx.array([29, 4], mx.int32))
    assert mx.array_equal(asked, mx.stack([found[0, -1:], found[1, 4:5]]))
    for row, length in enumerate(LENGTHS):
        alone = cached(dtype, eight_bits)
        alone.keep(mx.array([row]), CAPACITY)
        for w, end in ((0, 1), (1, 4), (4, 9), (9, 30)):
            alone.offset = mx.array([length + w], mx.int32)
            few = run(made, x[row : row + 1, w:end], alone)
            assert mx.array_equal(few, found[row : row + 1, w:end]), (row, w)
