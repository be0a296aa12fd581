"""Experts of a prompt's rows by the kernels for CUDA: what they compute, and that a row's bits depend on it alone."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import SLOW, error, exact, normal, running, weights_of
from mlx_lm.models.switch_layers import SwitchLinear

from headstart.kernels.cuda import prompt_experts as kernels
from headstart.kernels.cuda.prompt_experts import PromptTile, prompt_experts, prompt_experts_refusal
from headstart.kernels.weights import matrix_weights

ROUNDED = {mx.bfloat16: 1e-2, mx.float16: 2e-3}  # between operations, too
EXPERTS, TOP, ROWS = 6, 3, 40


@pytest.fixture(scope="module", autouse=True)
def card() -> Iterator[None]:
    with running("cuda"):
        yield


@pytest.fixture(autouse=True, params=[False, True], ids=["warps", "warpgroups"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PromptTile:
    """A small one, which compiles soon and has several blocks for an expert."""
    stages, span = (4, 128) if request.param else (3, 64)
    made = PromptTile(4, 32, stages, blocks=1, depth=256, span=span, warpgroups=request.param)
    monkeypatch.setattr(kernels, "choose_tile", lambda bits: made)
    return made


def experts(
    inputs: int, hidden: int, bits: int, group: int, dtype: str, mode: str = "affine", scales: str = ""
) -> list[nn.Module]:
    layers = []
    for seed, (outputs, width) in enumerate([(hidden, inputs), (hidden, inputs), (inputs, hidden)]):
        layer = SwitchLinear(width, outputs, EXPERTS, bias=False)
        layer.weight = normal(EXPERTS, outputs, width, seed=seed, dtype=mx.float32) * width**-0.5
        layer = layer if bits == 16 else layer.to_quantized(group, bits, mode)
        layer.set_dtype(getattr(mx, scales or dtype))
        layers.append(layer)
    return layers


def chosen(rows: int) -> mx.array:
    """Experts of rows: the second is everyone's, the first nobody's."""
    others = 2 + (mx.arange(rows)[:, None] * mx.array([1, 3]) + mx.array([0, 1])) % (EXPERTS - 2)
    others[:, 1] = mx.where(others[:, 1] == others[:, 0], 2 + (others[:, 0] - 1) % (EXPERTS - 2), others[:, 1])
    return mx.concatenate([others[:, :1], mx.ones((rows, 1), mx.int32), others[:, 1:]], axis=-1).astype(mx.uint32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


# Inputs, hidden, bits, group, type: pieces of scales of 4, 2 and 16 bytes; the last of a block's warps without work.
CASES: list[Any] = [
    (640, 64, 4, 64, "bfloat16", "affine", ""),
    (128, 64, 4, 16, "bfloat16", "nvfp4", ""),
    *(
        pytest.param(*case, *("affine", "")[len(case) - 5 :], marks=SLOW)
        for case in [
            (128, 256, 4, 32, "bfloat16"),
            (256, 512, 4, 128, "float16"),
            (128, 192, 8, 32, "bfloat16"),
            (1024, 128, 8, 64, "float16"),
            (192, 64, 16, 1, "bfloat16"),
            (128, 64, 16, 1, "float16"),
            (128, 128, 2, 64, "bfloat16"),
            (128, 128, 3, 64, "bfloat16"),
            (128, 128, 5, 64, "float16"),
            (128, 128, 6, 32, "bfloat16"),
            (128, 128, 1, 64, "bfloat16"),
            (256, 128, 4, 32, "bfloat16", "mxfp4"),
            (128, 64, 4, 32, "float16", "mxfp4"),
            (256, 128, 8, 32, "bfloat16", "mxfp8"),
            (128, 64, 8, 32, "float16", "mxfp8"),
            (128, 64, 4, 16, "float16", "nvfp4"),
            (128, 64, 4, 32, "bfloat16", "affine", "float16"),
            (128, 64, 5, 64, "bfloat16", "affine", "float32"),
            (128, 64, 8, 64, "float16", "affine", "float32"),
        ]
    ),
]


@pytest.mark.parametrize(("inputs", "hidden", "bits", "group", "dtype", "mode", "scales"), CASES)
def test_experts_are_those_of_float64_and_a_row_the_same_among_any(
    inputs: int, hidden: int, bits: int, group: int, dtype: str, mode: str, scales: str
) -> None:
    kind, layers = getattr(mx, dtype), experts(inputs, hidden, bits, group, dtype, mode, scales)
    found = [matrix_weights(layer) for layer in layers]
    assert not any(prompt_experts_refusal(kind, each) for each in found)
    x, indices = normal(ROWS * 2, inputs, seed=5, dtype=kind), chosen(ROWS * 2)
    made = prompt_experts(x, indices, *found)
    assert made.shape == (ROWS * 2, TOP, inputs)

    gate, up, down = (weights_of(layer)[np.array(indices)] for layer in layers)
    wide = exact(x)[:, None, :, None]
    hiddens = silu((gate @ wide)[..., 0]) * (up @ wide)[..., 0]
    assert error(made, (down @ hiddens[..., None])[..., 0]) < ROUNDED[kind]

    backwards = mx.arange(2 * ROWS - 1, -1, -1)
    for some in (slice(0, 1), slice(7, 30), slice(11, 80), backwards):  # other widths, places and neighbours
        alone = prompt_experts(x[some], indices[some], *found)
        assert mx.array_equal(alone, made[some]), some
    order = mx.array([2, 0, 1])
    assert mx.array_equal(prompt_experts(x[:9], indices[:9, order], *found), made[:9, order])
    shaped = prompt_experts(x.reshape(2, ROWS, inputs), indices.reshape(2, ROWS, TOP), *found)
    assert mx.array_equal(shaped, made.reshape(2, ROWS, TOP, inputs))


@SLOW
@pytest.mark.parametrize(
    "other", [kernels.choose_tile(4), PromptTile(4, 128, 4, 2), PromptTile(8, 128, 3, 1, 0, 128, True)]
)
def test_no_tile_changes_a_bit(other: PromptTile, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [matrix_weights(layer) for layer in experts(256, 128, 4, 64, "bfloat16")]
    x, indices = normal(150, 256, seed=5), chosen(150)
    made = prompt_experts(x, indices, *found)
    monkeypatch.setattr(kernels, "choose_tile", lambda bits: other)
    assert mx.array_equal(prompt_experts(x, indices, *found), made)


@SLOW
def test_layers_of_several_formats_and_any_activation() -> None:
    gate, up, down = (experts(128, 128, bits, 32, "bfloat16")[n] for n, bits in enumerate((4, 8, 6)))
    x, indices = normal(20, 128, seed=5), chosen(20)
    wide = exact(x)[:, None, :, None]
    opened, raised = ((weights_of(layer)[np.array(indices)] @ wide)[..., 0] for layer in (gate, up))
    for activation, hiddens in (
        (None, silu(opened) * raised),
        (lambda up, gate: up * mx.tanh(gate), raised * np.tanh(opened)),
    ):
        made = prompt_experts(x, indices, *map(matrix_weights, (gate, up, down)), activation)
        right = (weights_of(down)[np.array(indices)] @ hiddens[..., None])[..., 0]
        assert error(made, right) < 2 * ROUNDED[mx.bfloat16]
        backwards = prompt_experts(x[::-1], indices[::-1], *map(matrix_weights, (gate, up, down)), activation)
        assert mx.array_equal(backwards[::-1], made)


@pytest.mark.parametrize(("bits", "group"), [(4, 64), pytest.param(8, 32, marks=SLOW)])
def test_weights_are_what_dequantising_makes_of_them(bits: int, group: int, tile: PromptTile) -> None:
    """By rows that are one at one position."""
    layer = experts(64, 128, bits, group, "bfloat16")[2]  # 128 → 64
    found = matrix_weights(layer)
    ones, indices = mx.eye(128).astype(mx.bfloat16), mx.full((128, 1), 3, mx.uint32)
    order, tiles, arranged = kernels.launch_sort(ones, indices, found, tile)
    rows = kernels.launch_prompt_product(arranged[order], order, tiles, [found], tile)
    assert np.array_equal(exact(rows), exact(mx.array(weights_of(layer)[3].T).astype(mx.bfloat16)))


def test_what_does_not_fit_is_refused() -> None:
    def refusal(inputs: int, hidden: int, bits: int, group: int, dtype: mx.Dtype = mx.bfloat16) -> str:
        return str(prompt_experts_refusal(dtype, matrix_weights(experts(inputs, hidden, bits, group, "bfloat16")[0])))

    assert "activations are float32" in refusal(128, 64, 4, 64, mx.float32)
    assert "96 → 64" in refusal(96, 64, 4, 32)
