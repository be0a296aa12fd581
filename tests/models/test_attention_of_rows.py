"""Attention over mlx-lm's modules, against their own call."""

import mlx.core as mx
import pytest

from fixtures import FAMILIES, random_model
from headstart.kernels import Backend
from headstart.kernels.layers import Attention, Pass, Residual
from headstart.kernels.norms import Norm
from headstart.state import KV, BatchState

LENGTHS = [5, 70]  # what two ragged rows have read


@pytest.mark.usefixtures("stock_ops")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [1, 4, 40])
def test_attention_is_mlx_lms_to_the_last_bit(family: str, width: int) -> None:
    layer = next(layer for layer in random_model(family).weights.layers if not layer.is_linear).self_attn
    x = mx.random.normal((2, width, layer.q_proj.weight.shape[1]), key=mx.random.key(1))

    def memory() -> tuple[KV, mx.array]:
        kv = KV.empty(2, layer.num_key_value_heads, layer.head_dim, mx.float32)
        rows = BatchState([kv], mx.array(LENGTHS, mx.int32), mx.zeros((2,), mx.int32), LENGTHS)
        mask = rows.reserve(width)(None)
        kv.keys = mx.random.normal(kv.keys.shape, key=mx.random.key(2))
        kv.values = mx.random.normal(kv.values.shape, key=mx.random.key(3))
        return kv, mask

    (ours, mask), (theirs, _) = memory(), memory()
    nothing, one_pass = Residual(mx.zeros_like(x), Norm(x.shape[-1], 1e-6)), Pass(lambda window: mask, ours.offset)
    described = Attention(layer, layer.num_attention_heads, layer.num_key_value_heads, gated=True)
    found, _ = Backend().attention(described, x, ours, one_pass, nothing)
    assert mx.array_equal(found, layer(x, mask, theirs))
    assert mx.array_equal(ours.keys, theirs.keys)
    assert mx.array_equal(ours.values, theirs.values)
