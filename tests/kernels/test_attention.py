"""The CUDA kernels of attention, run on the CPU: what they compute, and that a query's bits depend on it alone."""

from collections.abc import Iterator
from pathlib import Path

import cuda_on_cpu
import mlx.core as mx
import pytest

from checkpoints import write, write_drafter
from fixtures import random_model
from headstart.checkpoint import load_model
from headstart.engine.step import prefill_prompts
from headstart.kernels import Backend
from headstart.kernels.cuda.attention import (
    SPLIT,
    WIDEST,
    launch_arrange,
    launch_arrange_into,
    launch_attention,
)
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.layers import Attention
from headstart.kernels.types import HeadNorms
from headstart.models.dflash import block_mask
from headstart.state import KV

H, HKV, D = 4, 2, 32
SCALE = D**-0.5


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated():
        yield


def normal(*shape: int, seed: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def window(offsets: list[int], width: int, capacity: int, dtype: mx.Dtype = mx.bfloat16) -> list[mx.array]:
    """Queries, gates, keys, values and offsets; beyond what a row has written there is no number."""
    rows = len(offsets)
    written = mx.array(offsets)[:, None, None, None] + width > mx.arange(capacity)[None, None, :, None]
    keys, values = (mx.where(written, normal(rows, HKV, capacity, D, seed=s), mx.nan).astype(dtype) for s in (1, 2))
    queries, gates = normal(rows, H, width, D, seed=3), normal(rows, width, H * 2 * D, seed=4)
    return [(2 * queries).astype(dtype), gates.astype(dtype), keys, values, mx.array(offsets, mx.int32)]


def in_float32(queries: mx.array, gates: mx.array, keys: mx.array, values: mx.array, offset: mx.array) -> mx.array:
    """The same by stock ops, over the positions that are there."""
    B, _, W, _ = queries.shape
    seen = mx.arange(keys.shape[2]) <= (offset[:, None] + mx.arange(W))[:, None, :, None]
    keys, values = (mx.where(mx.isnan(a), 0, a).astype(mx.float32) for a in (keys, values))
    queries, gates = queries.astype(mx.float32), gates.astype(mx.float32).reshape(B, W, H, 2 * D)[..., D:]
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=seen)
    return (out.transpose(0, 2, 1, 3) * mx.sigmoid(gates)).reshape(B, W, H * D)


# p is rounded to the type of the values, as in any tensor-core attention, and so is the output.
@pytest.mark.parametrize(("dtype", "allowed"), [(mx.bfloat16, 5e-3), (mx.float16, 6e-4)])
@pytest.mark.parametrize("width", [1, 4, 9])
def test_rows_of_any_length_get_what_stock_attention_gives_them(width: int, dtype: mx.Dtype, allowed: float) -> None:
    inputs = window([0, 3, SPLIT - 2, SPLIT, 2 * SPLIT + 5], width, 3 * SPLIT, dtype)
    found, expected = launch_attention(*inputs, SCALE, 3 * SPLIT).astype(mx.float32), in_float32(*inputs)
    for row in range(found.shape[0]):
        assert mx.linalg.norm(found[row] - expected[row]) < allowed * mx.linalg.norm(expected[row])


@pytest.mark.parametrize("width", [2, 4, 9, WIDEST])
def test_a_query_has_the_same_bits_in_a_window_of_any_width(width: int) -> None:
    queries, gates, keys, values, offset = window([SPLIT - 3], width, 2 * SPLIT)
    together = launch_attention(queries, gates, keys, values, offset, SCALE, 2 * SPLIT)
    for w in range(width):
        own = slice(w, w + 1)
        later = mx.arange(2 * SPLIT)[:, None] > offset + w  # not written yet when it is a window of its own
        alone = [mx.where(later, mx.nan, a).astype(a.dtype) for a in (keys, values)]
        found = launch_attention(queries[:, :, own], gates[:, own], *alone, offset + w, SCALE, 2 * SPLIT)
        assert mx.array_equal(found, together[:, own])


def test_a_query_has_the_same_bits_for_any_capacity_and_reach() -> None:
    small, large = window([SPLIT - 1], 3, 2 * SPLIT), window([SPLIT - 1], 3, 4 * SPLIT)
    large[2][:, :, : 2 * SPLIT], large[3][:, :, : 2 * SPLIT] = small[2], small[3]
    expected = launch_attention(*small, SCALE, SPLIT + 64)
    assert mx.array_equal(launch_attention(*small, SCALE, 2 * SPLIT), expected)
    assert mx.array_equal(launch_attention(*large, SCALE, 4 * SPLIT), expected)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    inputs = window([7, 2 * SPLIT - 2, SPLIT], 4, 3 * SPLIT)
    crowd = launch_attention(*inputs, SCALE, 3 * SPLIT)
    for row in range(3):
        only = slice(row, row + 1)
        assert mx.array_equal(launch_attention(*[a[only] for a in inputs], SCALE, 3 * SPLIT), crowd[only])


@pytest.mark.parametrize(("causal", "reach"), [(True, None), (False, None), (True, 70), (False, 5)])
def test_a_block_sees_later_positions_and_a_window_only_near_ones(causal: bool, reach: int | None) -> None:
    """As in a block drafter, whose queries have no gates."""
    queries, _, keys, values, offset = window([0, 3, SPLIT - 2, 2 * SPLIT + 5], 6, 3 * SPLIT)
    found = launch_attention(queries, None, keys, values, offset, SCALE, 3 * SPLIT, causal, reach)
    seen = block_mask(offset[:, None] + mx.arange(6), 3 * SPLIT, causal, reach)
    keys, values = (mx.where(mx.isnan(a), 0, a).astype(mx.float32) for a in (keys, values))
    expected = mx.fast.scaled_dot_product_attention(
        queries.astype(mx.float32), keys, values, scale=SCALE, mask=seen
    ).transpose(0, 2, 1, 3)
    difference = mx.linalg.norm(found.astype(mx.float32).reshape(expected.shape) - expected)
    assert difference < 5e-3 * mx.linalg.norm(expected)


# Stock ops round between the norm and the rotation.
@pytest.mark.parametrize(("dtype", "allowed"), [(mx.float32, 2e-6), (mx.bfloat16, 6e-3)])
def test_queries_and_keys_are_normed_and_rotated_as_by_the_stock_ops(dtype: mx.Dtype, allowed: float) -> None:
    layer = random_model().weights.mtp.layers[0].self_attn
    heads, kv_heads, dim = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
    both = normal(2, 3, heads * 2 * dim, seed=1, dtype=dtype)
    keys, values = (normal(2, 3, kv_heads * dim, seed=s, dtype=dtype) for s in (2, 3))
    offset = mx.array([0, 700], mx.int32)
    found = launch_arrange(both, keys, values, norms, layer.rope, offset)
    described, cached = Attention(layer, heads, kv_heads, gated=True), KV(keys, values, offset)
    expected = Backend().arrange(described, both, keys, values, cached)
    assert mx.array_equal(found.values, expected.values)
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
        assert mx.linalg.norm(ours - theirs) < allowed * mx.linalg.norm(theirs)
        assert ours.shape == theirs.shape


def test_without_gates_and_in_place_heads_have_the_same_bits() -> None:
    layer = random_model().weights.mtp.layers[0].self_attn
    heads, kv_heads, dim = layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
    both, offset = normal(2, 3, heads * 2 * dim, seed=1), mx.array([0, 7], mx.int32)
    queries = both.reshape(2, 3, heads, 2 * dim)[..., :dim].reshape(2, 3, -1)
    keys, values = (normal(2, 3, kv_heads * dim, seed=s) for s in (2, 3))
    gated = launch_arrange(both, keys, values, norms, layer.rope, offset)
    found = launch_arrange(queries, keys, values, norms, layer.rope, offset, gated=False)
    assert all(mx.array_equal(*pair) for pair in zip(gated, found, strict=True))
    before = [normal(2, kv_heads, 16, dim, seed=s) for s in (4, 5)]
    cached = [mx.array(a) for a in before]
    mx.eval(cached)
    new, *written = launch_arrange_into(queries, keys, values, norms, layer.rope, offset, (cached[0], cached[1]))
    assert mx.array_equal(new, gated.queries)
    for after, was, heads_ in zip(written, before, gated[1:], strict=True):
        for row, at in enumerate(offset.tolist()):
            was[row, :, at : at + 3] = heads_[row]
        assert mx.array_equal(after, was)


def test_a_token_is_arranged_with_the_same_bits_in_any_window() -> None:
    layer = random_model().weights.mtp.layers[0].self_attn
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
    widths = (2 * layer.num_attention_heads, layer.num_key_value_heads, layer.num_key_value_heads)
    products = [normal(2, 5, n * layer.head_dim, seed=n) for n in widths]
    offset = mx.array([9, 300], mx.int32)
    together = launch_arrange(*products, norms, layer.rope, offset)
    for row in range(2):
        for w in range(5):
            own = [a[row : row + 1, w : w + 1] for a in products]
            alone = launch_arrange(*own, norms, layer.rope, offset[row : row + 1] + w)
            pairs = zip(alone, together, strict=True)
            assert all(mx.array_equal(one, all_[row : row + 1, :, w : w + 1]) for one, all_ in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [None, False])
def test_a_block_drafter_drafts_what_it_does_with_stock_ops(causal: bool | None, tmp_path: Path) -> None:
    kinds, target = ("full_attention", "sliding_attention"), write(tmp_path / "target")
    drafter = write_drafter(tmp_path / "drafter", target, kinds=kinds, dim=32, is_causal=causal)

    def blocks(backend: Backend) -> list[mx.array]:
        model = load_model(target, drafter=drafter, dtype=mx.bfloat16, backend=backend)
        batch, drafts = prefill_prompts(model, [list(range(3, 12)), [5, 9]], max_k=15), []
        for k in (5, 15):
            drafts.append(model.block_logits(batch.last, k, batch.trunk_state)[0].astype(mx.float32))
            mx.eval(drafts, batch.arrays())
            model.trunk(mx.broadcast_to(batch.last[:, None], (2, k + 1)), batch.trunk_state, certain=1)
            batch.trunk_state.commit(mx.array([1, k]), most=k + 1)
        return drafts

    for ours, stock in zip(blocks(CudaBackend()), blocks(Backend()), strict=True):
        assert mx.linalg.norm(ours - stock) < 0.02 * mx.linalg.norm(stock)
