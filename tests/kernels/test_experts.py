"""MLPs, and mixtures of experts with their routers, on every backend."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import NAMES, ROUNDING, SLOW, choose_kernels, error, exact, no_mask, normal, nothing, weights_of
from mlx_lm.models.qwen3_next import Qwen3NextMLP, Qwen3NextSparseMoeBlock

from headstart.kernels import Backend
from headstart.kernels.layers import FeedForward, Pass, Residual
from headstart.kernels.norms import Norm

ROUNDED = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # between operations, too
H, HIDDEN, EXPERTS, TOP, ROWS = 64, 64, 5, 3, 10
# Backend, bits, size of a group, type.
CASES = [
    *(("reference", *each, "float32") for each in ((16, 1), (4, 64))),
    *(("cpu", *each, dtype) for each in ((16, 1), (4, 64), (8, 32), (3, 64)) for dtype in ("bfloat16", "float32")),
    ("cuda", 4, 32, "bfloat16"),
    ("cuda", 4, 16, "bfloat16"),  # nvfp4
    ("metal", 4, 32, "bfloat16"),
    *(
        pytest.param(*each, marks=SLOW)
        for each in [
            ("cuda", 16, 1, "bfloat16"),
            ("cuda", 8, 32, "float16"),
            ("cuda", 6, 32, "bfloat16"),
            ("metal", 16, 1, "bfloat16"),
            ("metal", 8, 64, "float16"),
            ("metal-columns", 16, 1, "float16"),
            ("metal-columns", 8, 32, "bfloat16"),
            ("metal-columns", 4, 64, "bfloat16"),
        ]
    ),
]
every_case = pytest.mark.parametrize(("backend", "bits", "group", "dtype"), CASES, indirect=["backend"])


def mixture(experts: int = EXPERTS, top: int = TOP, *, normed: bool = True, hidden: int = HIDDEN) -> nn.Module:
    mx.random.seed(experts)
    sizes = {"moe_intermediate_size": hidden, "shared_expert_intermediate_size": hidden}
    chosen = {"num_experts": experts, "num_experts_per_tok": top, "norm_topk_prob": normed}
    module = Qwen3NextSparseMoeBlock(SimpleNamespace(hidden_size=H, **sizes, **chosen))
    module.set_dtype(mx.float32)
    return module


def of_kind(module: nn.Module, bits: int, group: int, dtype: str) -> nn.Module:
    if bits < 16:
        nn.quantize(module, group, bits, mode="nvfp4" if group == 16 else "affine")
    module.set_dtype(getattr(mx, dtype))
    return module


def chosen_weights(layer: nn.Module, indices: mx.array | np.ndarray) -> np.ndarray:
    return weights_of(layer)[np.array(indices)]  # [..., E, N, K]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@every_case
def test_experts_are_those_of_float64_and_a_row_the_same_among_any_number(
    backend: Backend, bits: int, group: int, dtype: str
) -> None:
    kind, module = getattr(mx, dtype), of_kind(mixture(), bits, group, dtype)
    choose_kernels(backend, kind, ["experts"], module)
    switch, x = module.switch_mlp, normal(ROWS, 1, H, seed=1, dtype=kind)
    others = 1 + (mx.arange(ROWS)[:, None, None] + mx.array([0, 2])) % (EXPERTS - 1)
    # The first expert has more rows than are multiplied at a time.
    indices = mx.concatenate([mx.zeros((ROWS, 1, 1), mx.int32), others], axis=-1).astype(mx.uint32)
    allowed = 2 * ROUNDING[kind]
    plain = backend.expert_products(x, indices, None, False, (switch.up_proj, switch.gate_proj))
    if plain is None:  # MLX's compute a whole MLP of experts
        assert type(backend) is Backend
    else:
        wide = exact(x)[:, :, None, :, None]
        for made, layer in zip(plain, (switch.up_proj, switch.gate_proj), strict=True):
            assert error(made, (chosen_weights(layer, indices) @ wide)[..., 0]) < allowed
        hidden = backend.gated_experts(x, indices, None, False, switch.gate_proj, switch.up_proj)
        assert hidden is not None
        assert error(hidden, silu(exact(plain[1])) * exact(plain[0])) < ROUNDED[dtype]
        (down,) = (
            backend.expert_products(hidden, indices, None, False, (switch.down_proj,)) or ()
        )  # inputs of their own
        expected = (chosen_weights(switch.down_proj, indices) @ exact(hidden)[..., None])[..., 0]
        assert error(down, expected) < allowed
    together = backend.chosen_experts(switch, x, indices, None)
    opened, up = (
        (chosen_weights(layer, indices) @ exact(x)[:, :, None, :, None])[..., 0]
        for layer in (switch.gate_proj, switch.up_proj)
    )
    expected = (chosen_weights(switch.down_proj, indices) @ (silu(opened) * up)[..., None])[..., 0]
    assert error(together, expected) < ROUNDED[dtype]
    for count in (1, 2, 9):
        some = slice(ROWS - count, ROWS)
        alone = backend.chosen_experts(switch, x[some], indices[some], None)
        assert mx.array_equal(alone, together[some]) or type(backend) is Backend, count


@pytest.mark.parametrize("backend", ["reference", "cuda", "metal"], indirect=True)
@pytest.mark.parametrize(
    ("count", "top", "normed", "dtype"),
    [(256, 8, True, "bfloat16"), (40, 3, False, "float16"), (33, 8, True, "bfloat16")],
)
def test_the_best_experts_are_chosen_and_the_first_of_equals(
    backend: Backend, count: int, top: int, normed: bool, dtype: str
) -> None:
    kind = getattr(mx, dtype)
    choose_kernels(backend, kind, ["route"], of_kind(mixture(count, top, normed=normed), 16, 1, dtype))
    draws = np.random.default_rng(count).integers(-9, 9, (6, count)) / 4  # many are equal
    draws[1, ::3], draws[2] = -np.inf, 0.0
    logits = mx.array(draws, kind).reshape(2, 3, count)
    indices, scores = backend.route(logits, top, normed)
    gates = np.exp(draws - draws.max(-1, keepdims=True))
    gates = gates / gates.sum(-1, keepdims=True)
    best = np.sort(gates, axis=-1)[:, -top:]
    expected = best / best.sum(-1, keepdims=True) if normed else best
    assert error(mx.sort(scores, axis=-1).reshape(6, top), expected) < 5e-3
    assert np.allclose(np.sort(np.take_along_axis(gates, np.array(indices).reshape(6, top), -1), -1), best)
    if type(backend) is not Backend:  # MLX's name them in any order
        order = np.argsort(-draws, axis=-1, kind="stable")[:, :top]
        assert np.array_equal(np.array(indices).reshape(6, top), order)
        alone = backend.route(logits[1:, 1:2], top, normed)
        assert mx.array_equal(alone[0], indices[1:, 1:2])
        assert mx.array_equal(alone[1], scores[1:, 1:2])


@pytest.mark.parametrize("backend", ["reference", "cuda", "metal"], indirect=True)
def test_routing_a_row_of_nan_names_experts_that_exist(backend: Backend) -> None:
    logits = mx.full((2, 40), mx.nan, mx.bfloat16)
    logits[1, :2] = mx.array([1, -mx.inf])
    choose_kernels(backend, mx.bfloat16, ["route"], of_kind(mixture(40, 3), 16, 1, "bfloat16"))
    assert int(backend.route(logits, 3, True)[0].max()) < 40


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=SLOW)])
@pytest.mark.parametrize("backend", ["reference", "cuda", "metal"], indirect=True)
def test_what_experts_made_is_combined(backend: Backend, dtype: str) -> None:
    kind, size = getattr(mx, dtype), 40
    module = of_kind(mixture(), 16, 1, dtype)
    module.shared_expert.down_proj.weight = normal(size, HIDDEN, seed=1, dtype=kind)
    choose_kernels(backend, kind, ["combine"], module)
    parts, scores = normal(ROWS, TOP, size, seed=6, dtype=kind), mx.softmax(normal(ROWS, TOP, seed=7), axis=-1)
    given = parts, scores.astype(kind), normal(ROWS, size, seed=8, dtype=kind), normal(ROWS, 1, seed=9, dtype=kind)
    wide = [exact(array) for array in given]
    expected = (wide[0] * wide[1][..., None]).sum(-2) + wide[2] / (1 + np.exp(-wide[3]))
    found = backend.combine(*given)
    assert error(found, expected) < (2e-2 if type(backend) is Backend else ROUNDING[kind])
    for rows in (1, 2, 9):
        assert mx.array_equal(backend.combine(*[array[ROWS - rows :] for array in given]), found[ROWS - rows :])


@every_case
@pytest.mark.parametrize("mixes", [False, True])
def test_a_feed_forward_is_added_to_the_residual(
    backend: Backend, bits: int, group: int, dtype: str, mixes: bool
) -> None:
    kind = getattr(mx, dtype)
    module = of_kind(mixture() if mixes else Qwen3NextMLP(H, HIDDEN), bits, group, dtype)
    wanted = ["product", *(("experts", "route", "combine") if mixes else ())]
    choose_kernels(backend, kind, wanted, module)
    x, before = (normal(3, 5, H, seed=seed, dtype=kind) for seed in (3, 4))
    run, residual = Pass(no_mask, mx.zeros((3,), mx.int32)), Residual(before, Norm(H, 1e-6))

    def feed_forward(x: mx.array, residual: Residual) -> tuple[mx.array, mx.array]:
        return backend.feed_forward(FeedForward(module), x, run, residual)

    total, normed = feed_forward(x, residual)
    made, _ = feed_forward(x, nothing(x))
    assert mx.array_equal(total, before + made), "the sum is that of the parts"
    assert mx.array_equal(normed, backend.norm(total, residual.norm))
    expected = in_float64(backend, module, x)
    assert np.abs(exact(made) - expected).max() < ROUNDED[dtype] * np.abs(expected).max()
    for row, token in ((0, 0), (2, 3)) if type(backend) is not Backend else ():
        alone = x[row : row + 1, token : token + 1]
        assert mx.array_equal(feed_forward(alone, nothing(alone))[0][0, 0], made[row, token])


@pytest.mark.parametrize("backend", NAMES, indirect=True)
@pytest.mark.parametrize("bits", [4, 16])
def test_an_mlp_may_have_biases(backend: Backend, bits: int) -> None:
    module, x = Qwen3NextMLP(H, HIDDEN), normal(2, 3, H, seed=1, dtype=mx.float32)
    for n, (layer, size) in enumerate([("gate_proj", HIDDEN), ("up_proj", HIDDEN), ("down_proj", H)]):
        module[layer].bias = normal(size, seed=n, dtype=mx.float32)
    plain = of_kind(module, bits, 32, "float32")
    opened, up = (exact(x) @ weights_of(each).T + exact(each.bias) for each in (plain.gate_proj, plain.up_proj))
    expected = silu(opened) * up @ weights_of(plain.down_proj).T + exact(plain.down_proj.bias)
    run = Pass(no_mask, mx.zeros((2,), mx.int32))
    found, _ = backend.feed_forward(FeedForward(plain), x, run, nothing(x))
    assert error(found, expected) < ROUNDED["float32"]


def in_float64(backend: Backend, module: Any, x: mx.array) -> np.ndarray:
    wide = exact(x)[..., None]
    if "switch_mlp" not in module:
        opened, up = (weights_of(layer) @ wide for layer in (module.gate_proj, module.up_proj))
        return (weights_of(module.down_proj) @ (silu(opened) * up))[..., 0]
    gates = np.exp(exact(backend.product(x, module.gate)))
    indices = np.argsort(-gates, axis=-1, kind="stable")[..., :TOP]  # the first of equals
    scores = np.take_along_axis(gates, indices, axis=-1)
    scores = scores / scores.sum(-1, keepdims=True)
    wide, switch = wide[:, :, None], module.switch_mlp
    opened, up = (chosen_weights(layer, indices) @ wide for layer in (switch.gate_proj, switch.up_proj))
    parts = (chosen_weights(switch.down_proj, indices) @ (silu(opened) * up))[..., 0]
    shared = in_float64(backend, module.shared_expert, x)
    gate = 1 / (1 + np.exp(-exact(x) @ weights_of(module.shared_expert_gate).T))
    return (parts * scores[..., None]).sum(-2) + gate * shared
