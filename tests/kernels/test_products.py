"""Products of linear layers on every backend: what they compute, that a row's bits depend on it alone, and when MLX's
are taken instead."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from backends import NAMES, ROUNDING, SLOW, choose_kernels, error, exact, linear, normal, weights_of
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from headstart.kernels import Backend
from headstart.kernels.cuda import backend as cuda
from headstart.kernels.cuda import products as cuda_products
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.cuda.products import product_refusal
from headstart.kernels.metal import backend as metal
from headstart.kernels.metal.products import metal_refusal
from headstart.kernels.products import stock_product
from headstart.kernels.weights import NVFP4_MOST, MatrixWeights, matrix_weights, scaled_layer

K = 384  # few chunks of 4-bit codes, more of 8-bit ones: not the same number for every slice
LONG = 2560  # of 4-bit codes: chunks of a line of memory, two or three of them a slice; more than a chunk on CPUs
SIXTEEN = [("bfloat16", mx.bfloat16), ("float16", mx.float16)]


def cases() -> Iterator[Any]:
    """Backend, bits, size of a group, outputs, inputs, type."""
    both = ("bfloat16", "float32")
    yield from (("reference", bits, group, 33, K, "float32") for bits, group in ((16, 1), (4, 64), (8, 32)))
    sizes = [(1024, K), (37, 100), (8, 64), (3, 31), (5, 1), (70, 2688)]
    yield from (("cpu", 16, 1, *size, dtype) for size in sizes for dtype in both)
    formats = [(bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
    yield from (("cpu", *each, 70, K, dtype) for each in formats for dtype in both)
    yield from (("cpu", bits, 64, 70, 2688, "float32") for bits in (3, 4))
    fast = [
        ("cuda", 4, 64, 48, K, "bfloat16"),
        ("cuda", 4, 64, 1, 64, "bfloat16"),  # less than a chunk, less than a tile
        ("cuda", 8, 32, 33, 96, "float16"),
        ("cuda", 16, 1, 40, 640, "float16"),
        ("metal", 4, 64, 6, 576, "bfloat16"),  # more than a step of some lanes
        ("metal-matrix", 4, 64, 33, 384, "float32"),  # more than a tile, and more than a block of some slices
        ("metal-tensor", 4, 64, 33, 384, "bfloat16"),
        ("cuda", 6, 64, 48, K, "bfloat16"),
    ]
    yield from fast
    slow = [
        ("cuda", 4, 32, 33, K, "float16"),
        ("cuda", 4, 128, 16, K, "bfloat16"),
        ("cuda", 8, 64, 48, K, "bfloat16"),
        ("cuda", 16, 1, 48, K, "bfloat16"),
        ("cuda", 4, 64, 100, LONG, "bfloat16"),
        ("cuda", 8, 128, 40, LONG // 2, "bfloat16"),
        ("metal", 16, 1, 9, 2064, "bfloat16"),
        ("metal", 8, 32, 9, 96, "float16"),
        *(("cuda", bits, 64, 33, LONG, "bfloat16") for bits in (1, 2, 3, 5, 6)),
        *(("cuda", bits, 32, 33, K, "bfloat16") for bits in (1, 2, 3, 5, 6)),
        *(("cuda", bits, 128, 33, K, "float16") for bits in (1, 2, 3, 5, 6)),
        ("metal", 4, 32, 33, 96, "float16"),
        ("metal", 4, 128, 6, LONG, "bfloat16"),  # a lane takes several steps
        ("metal", 4, 64, 1, 64, "bfloat16"),  # a single scale: MLX passes it as a constant
        ("metal", 4, 32, 17, 2144, "float32"),
        ("metal", 4, 128, 9, 640, "bfloat16"),
        ("metal", 8, 32, 9, 2144, "bfloat16"),
        ("metal", 8, 64, 9, 2112, "bfloat16"),
        ("metal", 8, 64, 9, 576, "bfloat16"),
        ("metal", 8, 128, 9, 640, "bfloat16"),
        ("metal", 8, 128, 5, LONG, "float32"),
        ("metal", 16, 1, 40, 640, "float16"),
        ("metal-matrix", 4, 32, 5, 64, "float32"),  # slices without a block
        ("metal-matrix", 4, 128, 40, 512, "float16"),
        ("metal-matrix", 8, 32, 33, 576, "bfloat16"),
        ("metal-matrix", 8, 64, 9, 384, "float16"),
        ("metal-matrix", 8, 128, 9, 512, "float32"),
        ("metal-matrix", 16, 1, 33, 320, "bfloat16"),
        ("metal-matrix", 16, 1, 1, 32, "float16"),
        ("metal-tensor", 4, 32, 5, 64, "float16"),
        ("metal-tensor", 4, 128, 40, 512, "bfloat16"),
        ("metal-tensor", 8, 32, 33, 576, "float16"),
        ("metal-tensor", 8, 64, 9, 384, "bfloat16"),
        ("metal-tensor", 16, 1, 33, 320, "bfloat16"),
    ]
    yield from (pytest.param(*each, marks=SLOW) for each in slow)


ROWS = {  # in all, and alone
    "reference": (9, ()),
    "cpu": (80, (*range(1, 17), 67)),
    "cuda": (40, (1, 2, 8, 9, 16, 17)),
    "metal": (16, range(1, 16)),
    "metal-matrix": (64, range(1, 64)),
    "metal-tensor": (64, range(1, 64)),
}
FEW = (1, 2, 3, 8, 9, 16, 17, 33)  # of those that take long, where tests are fast


@pytest.mark.parametrize(("backend", "bits", "group", "outputs", "inputs", "dtype"), [*cases()], indirect=["backend"])
def test_a_product_is_that_of_float64_and_a_row_the_same_among_any_number(
    backend: Backend, bits: int, group: int, outputs: int, inputs: int, dtype: str, request: pytest.FixtureRequest
) -> None:
    kind, layer = getattr(mx, dtype), linear(outputs, inputs, bits, group, dtype)
    choose_kernels(backend, kind, ["product"], layer)
    name = request.node.callspec.params["backend"]
    most, alone = ROWS[name]
    if most == 64 and not request.node.get_closest_marker("slow"):
        alone = FEW
    x = normal(most, inputs, seed=1, dtype=kind)
    found = backend.product(x, layer)
    # What is left is the rounding of the output, and in float32 that of sums.
    assert error(found, exact(x) @ weights_of(layer).T) < 2 * ROUNDING[kind]
    if not inputs % (2 * group):
        # Everything cancels, so that what is left is the rounding of the sums: another order would show in every bit.
        x = mx.concatenate([x[:, : inputs // 2], -x[:, : inputs // 2]], axis=1)
        found = backend.product(x, layer)
    for rows in alone:
        assert mx.array_equal(backend.product(x[most - rows :], layer), found[most - rows :]), rows


FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
SIZES = {"cpu": ((70, K), (5, 32), (33, 96), (6, 2688)), "cuda": ((48, K), (33, 192), (8, 1024))}


@pytest.mark.parametrize(
    ("backend", "mode", "dtype"),
    [
        *(("cpu", mode, dtype) for mode in FLOATS for dtype in (mx.bfloat16, mx.float32)),
        *(
            pytest.param("cuda", mode, dtype, marks=() if (mode, dtype) == ("nvfp4", mx.bfloat16) else SLOW)
            for mode in FLOATS
            for dtype in (mx.bfloat16, mx.float16)
        ),
    ],
    indirect=["backend"],
)
def test_codes_of_floats_are_multiplied_and_a_row_is_the_same_among_any_number(
    backend: Backend, mode: str, dtype: mx.Dtype, request: pytest.FixtureRequest
) -> None:
    bits, group = FLOATS[mode]
    for outputs, inputs in SIZES[request.node.callspec.params["backend"]]:
        layer = linear(outputs, inputs, bits, group, str(dtype).removeprefix("mlx.core."), mode)
        x = normal(40, inputs, seed=1, dtype=dtype)
        found = backend.product(x, layer)
        assert not mx.array_equal(found, stock_product(x, layer))  # it is not MLX's
        assert error(found, exact(x) @ weights_of(layer).T) < 2 * ROUNDING[dtype]
        for rows in (1, 2, 3, 4, 7, 16, 17):
            assert mx.array_equal(backend.product(x[40 - rows :], layer), found[40 - rows :]), rows


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", mx.float32), ("cuda", mx.bfloat16)], indirect=["backend"])
@pytest.mark.parametrize("mode", FLOATS)
def test_every_code_and_every_scale_is_what_mlx_takes_it_for(backend: Backend, mode: str, dtype: mx.Dtype) -> None:
    """256 codes by 254 scales; those that are no numbers are left out."""
    bits, group = FLOATS[mode]
    layer = linear(256, 256, bits, group, "float32", mode)
    codes = np.arange(256, dtype=np.uint8)
    if mode == "mxfp8":
        codes[[0x7F, 0xFF]] = 0
    scales = np.arange(256, dtype=np.uint8)
    scales[[255, 127] if mode == "nvfp4" else [255]] = 1
    layer.weight = mx.array(np.tile(codes, (256, bits // 4))[:, : 256 * bits // 8].copy().view(np.uint32))
    layer.scales = mx.array(np.repeat(scales[:, None], 256 // group, axis=1))
    eye, half = mx.eye(256).astype(dtype), dtype == mx.bfloat16
    found = mx.concatenate([backend.product(eye[at : at + 128], layer) for at in (0, 128)]).T.astype(mx.float32)
    expected = mx.dequantize(layer.weight, layer.scales, None, group, bits, mode, dtype=mx.float32)
    # What is less is rounded in either's own way; on CUDA from 2^-66 on, and infinite where it is that in bfloat16.
    normal_numbers = (mx.abs(expected) >= (2.0**-60 if half else 2.0**-126)) & (mx.abs(expected) < 2.0**127)
    assert mx.array_equal(mx.where(normal_numbers, found, 0), mx.where(normal_numbers, expected, 0))
    assert normal_numbers.sum() > (0.7 if half else 0.9) * (expected != 0).sum()


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", mx.float32), ("cuda", mx.bfloat16)], indirect=["backend"])
@pytest.mark.parametrize("experts", [0, 5])
def test_a_matrix_in_nvfp4_has_a_scale_of_its_own(backend: Backend, experts: int, dtype: mx.Dtype) -> None:
    plain = (
        QuantizedSwitchLinear(128, 40, experts, False, 16, 4, "nvfp4")
        if experts
        else linear(40, 128, 4, 16, mode="nvfp4")
    )
    layer = scaled_layer(plain)
    layer.weight, layer.scales = plain.weight, plain.scales
    layer.global_scale = NVFP4_MOST * (0.3 + mx.arange(max(experts, 1))).reshape(plain.weight.shape[:-2])
    x, indices = (
        normal(6, 128, seed=1, dtype=dtype),
        mx.array([[0, 2], [4, 1], [3, 3], [0, 1], [1, 0], [2, 4]], mx.uint32),
    )
    wide = x.astype(mx.float32)
    if experts:
        (found,) = backend.expert_products(x, indices, None, False, [layer])
        expected = layer(wide[:, None, None, :], indices).squeeze(-2)
    else:
        found, expected = backend.product(x, layer), layer(wide)
    if dtype == mx.float32:
        assert not mx.array_equal(found, expected)  # it is not MLX's
    else:
        assert product_refusal(dtype, matrix_weights(layer)) is None
    assert error(found, expected) < (1e-6 if dtype == mx.float32 else 2 * ROUNDING[dtype])


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize(
    ("bits", "group", "scales"),
    [
        (4, 32, mx.float16),
        *(
            pytest.param(*each, marks=SLOW)
            for each in [(4, 64, mx.float32), (5, 32, mx.float32), (8, 32, mx.float16)]
        ),
    ],
)
def test_scales_keep_a_type_of_their_own(backend: Backend, bits: int, group: int, scales: mx.Dtype) -> None:
    layer, x = linear(40, K, bits, group, "float32"), normal(17, K, seed=1)
    layer.set_dtype(scales)
    found = backend.product(x, layer)
    assert error(found, exact(x) @ weights_of(layer).T) < 2 * ROUNDING[mx.bfloat16]
    assert mx.array_equal(backend.product(x[:1], layer), found[:1])


@pytest.mark.parametrize("mode", FLOATS)
@pytest.mark.parametrize("backend", [name for name in NAMES if name != "cpu"], indirect=True)
def test_other_formats_are_multiplied_by_mlx(backend: Backend, mode: str) -> None:
    bits, group = FLOATS[mode]
    layer, x = linear(40, 128, bits, group, "float32", mode), normal(3, 128, seed=1, dtype=mx.float32)
    choose_kernels(backend, mx.float32, ["product"], layer, fit=False)
    assert mx.array_equal(backend.product(x, layer), stock_product(x, layer))
    assert error(backend.product(x, layer), exact(x) @ weights_of(layer).T) < 1e-5


@pytest.mark.parametrize("backend", [*NAMES, pytest.param("metal-columns", marks=SLOW)], indirect=True)
def test_layers_that_share_an_input_have_the_bits_of_each_alone(backend: Backend) -> None:
    alike = [linear(outputs, K, 4, 64) for outputs in (48, 1, 33)]
    unlike = [*alike[:2], linear(16, K, 8, 32), linear(40, K)]
    if isinstance(backend, CudaBackend):
        unlike.append(linear(16, K, 4, 16, mode="nvfp4"))
    choose_kernels(backend, mx.bfloat16, ["product"], *unlike, *alike)
    x = normal(2, 1, K, seed=3)
    for layers in (alike, unlike):
        for found, layer in zip(backend.products(x, layers), layers, strict=True):
            assert found.shape == (2, 1, layer.weight.shape[0])
            assert mx.array_equal(found, backend.product(x, layer))


@pytest.mark.parametrize("backend", NAMES, indirect=True)
@pytest.mark.parametrize(("bits", "rows"), [(4, 3), pytest.param(16, 11, marks=SLOW)])
def test_a_gated_product_is_silu_of_the_gate_times_up(backend: Backend, bits: int, rows: int) -> None:
    gate, up = (linear(outputs, K, bits, 64 if bits < 16 else 1) for outputs in (40, 40))
    up.weight = up.weight[::-1]  # a view: kernels see dense memory
    choose_kernels(backend, mx.bfloat16, ["product"], gate, up)
    x = normal(rows, K, seed=4)
    opened, plain = (exact(backend.product(x, layer)) for layer in (gate, up))
    found = backend.gated_product(x, gate, up)
    assert error(found, opened / (1 + np.exp(-opened)) * plain) < 2e-2
    assert mx.array_equal(found[1:2], backend.gated_product(x[1:2], gate, up))


@pytest.mark.parametrize("backend", NAMES, indirect=True)
@pytest.mark.parametrize("bits", [4, 16])
def test_a_bias_is_added_and_weights_that_are_replaced_are_seen(backend: Backend, bits: int) -> None:
    layer, x = linear(33, K, bits, 64 if bits < 16 else 1), normal(3, K, seed=1)
    choose_kernels(backend, mx.bfloat16, ["product"], layer)
    plain, expected = backend.product(x, layer), exact(x) @ weights_of(layer).T
    layer.bias = normal(33, seed=2)
    assert error(backend.product(x, layer), expected + exact(layer.bias)) < 3e-2  # MLX's round more often
    gated = backend.gated_product(x, layer, layer)
    made = exact(backend.product(x, layer))
    assert error(gated, made * made / (1 + np.exp(-made))) < 2e-2
    del layer.bias
    name = "weight" if bits == 16 else "scales"
    layer[name] = 2 * layer[name]
    if bits < 16:
        layer.biases = 2 * layer.biases
        layer.weight = mx.array(layer.weight)
    assert mx.array_equal(backend.product(x, layer), 2 * plain)
    assert not {"_linear", "_matrix"} & set(layer.parameters())


@pytest.mark.parametrize("backend", ["cuda"], indirect=True)
@pytest.mark.parametrize("rows", [pytest.param(2, marks=SLOW), 12])
def test_a_block_that_takes_tile_after_tile_has_the_bits_of_one_that_takes_one(
    backend: Backend, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    several, x = [linear(outputs, LONG, 4, 64) for outputs in (120, 1, 33)], normal(rows, LONG, seed=3)
    one = backend.products(x, several)
    for blocks in (1, 3, 7):
        monkeypatch.setattr(cuda_products, "FULL", blocks)
        assert all(map(mx.array_equal, backend.products(x, several), one)), blocks


@pytest.mark.parametrize(
    ("backend", "module", "launch"),
    [("cuda", cuda, "launch_products"), ("metal", metal, "metal_products")],
    indirect=["backend"],
)
def test_a_chunk_of_a_prompt_takes_the_product_of_mlx(
    backend: Backend, module: Any, launch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, taken = linear(16, 64), []
    choose_kernels(backend, mx.bfloat16, ["product"], layer)
    monkeypatch.setattr(module, launch, lambda x, *rest: taken.append(len(x)) or [layer(x)])
    for rows in (1, backend.most_rows, backend.most_rows + 1, 512):
        backend.product(normal(rows, 64, seed=1), layer)
    assert taken == [1, backend.most_rows]


def held(outputs: int, inputs: int, bits: int, group: int, *, experts: int = 0) -> MatrixWeights:
    shape = (*[experts] * bool(experts), outputs, inputs)
    return MatrixWeights(*mx.quantize(mx.ones(shape, mx.bfloat16), group, bits), bits, group)


def refusals() -> Iterator[Any]:
    """What says why weights are not taken, the reason, the activations' type and the weights."""
    four, layer = held(16, 128, 4, 64), nn.Linear(128, 8, bias=False)

    def of_metal(dtype: mx.Dtype, weights: MatrixWeights) -> str | None:
        return metal_refusal(dtype, layer, weights)

    for says in (product_refusal, of_metal):
        yield says, None, mx.bfloat16, four
    yield of_metal, "3 bits in groups of 64", mx.bfloat16, MatrixWeights(*four.arrays(), 3, 64)
    yield of_metal, "affine", mx.bfloat16, MatrixWeights(*four.arrays(), 4, 64, "mxfp4")
    yield of_metal, "affine", mx.float16, four
    yield product_refusal, None, mx.float16, four
    yield product_refusal, None, mx.bfloat16, held(16, 128, 3, 64)
    yield product_refusal, "4 bits in groups of 64", mx.bfloat16, MatrixWeights(*four.arrays(), 4, 64, "mxfp4")
    yield product_refusal, "192 inputs are no multiple of 128", mx.bfloat16, held(16, 192, 3, 64)
    unlike = MatrixWeights(four.weight, four.scales, four.biases.astype(mx.float32), 4, 64)
    yield product_refusal, "biases are not", mx.bfloat16, unlike
    yield product_refusal, "activations are float32", mx.float32, four
    yield product_refusal, "weights are float32", mx.bfloat16, MatrixWeights(mx.zeros((16, 128)))
    yield (
        product_refusal,
        "40 inputs are no multiple of 32",
        mx.bfloat16,
        MatrixWeights(mx.zeros((16, 40), mx.bfloat16)),
    )
    yield product_refusal, "96 inputs are no multiple of 64", mx.bfloat16, held(16, 96, 4, 32)
    yield product_refusal, "an expert's scales", mx.bfloat16, held(12, 64, 4, 64, experts=2)
    yield of_metal, "in multiples of 16", mx.bfloat16, MatrixWeights(mx.zeros((8, 24), mx.bfloat16))
    yield of_metal, "fewer than 8 words of weights", mx.bfloat16, held(1, 32, 4, 32)
    yield of_metal, "activations are int32", mx.int32, four


@pytest.mark.parametrize(("says", "reason", "dtype", "weights"), [*refusals()])
def test_what_does_not_fit_is_named(
    says: Callable[[mx.Dtype, MatrixWeights], str | None], reason: str | None, dtype: mx.Dtype, weights: MatrixWeights
) -> None:
    assert says(dtype, weights) is reason is None or (reason or "nothing") in (says(dtype, weights) or "")


def test_a_bias_does_not_fit_on_metal() -> None:
    assert metal_refusal(mx.bfloat16, nn.Linear(128, 8), held(16, 128, 4, 64)) == "it has a bias"
