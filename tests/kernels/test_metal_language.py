"""The text of every Metal kernel, as MLX compiles it, is one that a compiler with Metal's address spaces takes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import metal_as_opencl
import mlx.core as mx
import mlx.nn as nn
import pytest
from metal_as_opencl import Printed, complaints, mistakes, printed, printing
from mlx_lm.models.gated_delta import gated_delta_ops

from families import CONFIGS
from fixtures import FAMILIES, write_any
from headstart.checkpoint import load_model
from headstart.engine.invariance import _logits
from headstart.kernels.metal import choice, device, experts, products, stock
from headstart.kernels.metal.backend import MetalBackend
from headstart.kernels.metal.choice import Candidate, KernelCheck, Operation
from headstart.kernels.metal.tune_fused import model_operations
from headstart.kernels.metal.tune_sampling import CHANGED, WAYS, AllMetal, sample
from headstart.models import Model
from headstart.sampling import SequenceParams, controls

KERNELS = (device.metal_kernel, products._product_kernel, experts._experts_kernel)


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    metal_as_opencl.need_clang()
    monkeypatch.setattr(choice, "_decided", {})
    monkeypatch.setattr(products, "has_matrix_units", lambda: True)
    monkeypatch.setattr(stock, "gated_delta_kernel", gated_delta_ops)
    for kernel in KERNELS:
        kernel.cache_clear()
    with printing(monkeypatch):
        yield
    for kernel in KERNELS:
        kernel.cache_clear()


def tiny(family: str, folder: Path, bits: int = 16, dtype: mx.Dtype = mx.bfloat16) -> Model:
    model = load_model(write_any(folder, family), dtype=dtype)
    if bits < 16:
        nn.quantize(model.weights, 32, bits, class_predicate=lambda _, module: hasattr(module, "to_quantized"))
    return replace(model, backend=MetalBackend())


def candidates(described: list[Operation], rows: tuple[int, ...]) -> list[mx.array]:
    """Trace every form of every kernel of ours, in windows and batches."""
    made = []
    for operation in described:
        for name, runs in operation.candidates().items():
            if isinstance(runs, str) or not name.startswith("metal"):
                continue
            for run in runs:
                counts = [(n, 1) for n in rows if n <= operation.sequences]
                for b, w in (
                    *counts,
                    *[(n, operation.width) for n in (1, operation.sequences) if operation.width > 1],
                ):
                    made.append(run(slice(0, b), slice(0, w)))
    return made


def step(model: Model, described: list[Operation], width: int, sequences: int) -> list[mx.array]:
    """Trace a step with a kernel of ours for everything that has one."""
    for operation in described:
        name, runs = next(each for each in operation.candidates().items() if each[0].startswith("metal"))
        if not isinstance(runs, str):
            kernel = KernelCheck(operation.operation, operation.shape, name, True, (Candidate(name, None, True),))
            choice._decided[f"{operation.operation} {operation.shape}"] = kernel
    return [_logits(model, width, sequences)]


def kernels_of(model: Model, rows: tuple[int, ...], steps: tuple[tuple[int, int], ...]) -> list[Printed]:
    described = model_operations(model.weights, model.layers, model.dtype)
    found = printed(lambda: candidates(described, rows))
    for width, sequences in steps:
        found += printed(lambda width=width, sequences=sequences: step(model, described, width, sequences))  # type: ignore[misc]
    return found


def test_kernels_of_every_family_are_metal(tmp_path: Path, tracing: None) -> None:
    kernels = []
    for family in (*CONFIGS, *FAMILIES):
        found = kernels_of(tiny(family, tmp_path / family), rows=(1,), steps=((2, 4),))
        assert found, family
        kernels += found
    assert mistakes(kernels) == ""


def test_kernels_of_sampling_are_metal(tracing: None) -> None:
    """For a batch and for one sequence, whose numbers MLX passes in another address space."""
    kernels = []
    for sequences in (8, 1):
        for params in (WAYS[3], CHANGED):
            rows = controls([SequenceParams(params, 1, 0, 9)] * sequences, 4200)
            logits = mx.zeros((sequences, 2, 4200), mx.bfloat16)
            kernels += printed(lambda logits=logits, rows=rows: [sample(AllMetal(), logits, logits, rows)])  # type: ignore[misc]
    names = " ".join(kernel.name for kernel in kernels)
    assert all(name in names for name in ("survey", "plan", "gather", "draw", "excess", "accept", "scores"))
    assert mistakes(kernels) == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_every_type_and_width_are_metal(
    family: str, bits: int, dtype: mx.Dtype, tmp_path: Path, tracing: None
) -> None:
    model = tiny(family, tmp_path, bits, dtype)
    assert mistakes(kernels_of(model, tuple(range(1, 17)), ((1, 1), (4, 1), (16, 1), (2, 8), (1, 16)))) == ""


# What Metal refuses, by how it is planted: in the functions of a header or in a kernel's text.
FAULTS = {
    "a pointer without its space": ("const device T* x, const device void* w", "const T* x, const device void* w"),
    "a local pointer without its space": ("const device T* from = x", "const T* from = x"),
    "a constant of the program": ("constant constexpr int OUTPUTS", "constexpr int OUTPUTS"),
    "a constant of a struct": ("static constant constexpr int COUNT", "static constexpr int COUNT"),
    "a method without `thread`": ("int row, int lane) const thread {", "int row, int lane) const {"),
    "a reference to an array without `thread`": ("const thread int (&inputs)[ROWS]", "const int (&inputs)[ROWS]"),
    "a reference without `thread`": ("const thread Old& old", "const Old& old"),
    "a double": ("float sum = 0.0f;", "float sum = 0.0;"),
    "gates that are `constant` in small shapes": ("Gate b_gate,", "const device T* b_gate,"),
    "routing scores that are `constant` in small shapes": (
        "Scores scores, int top",
        "const device T* scores, int top",
    ),
    "memory of a threadgroup passed as a thread's": ("threadgroup float* line,", "float* line,"),
    "tiles of a threadgroup passed as a thread's": ("threadgroup T* tiles,", "T* tiles,"),
    "a descriptor of the program": ("constant constexpr auto TILE", "constexpr auto TILE"),
    "a pointer in a launcher": ("static_cast<const device T*>(nullptr)", "static_cast<const T*>(nullptr)"),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> list[Printed]:
    """Kernels of a mixture with full and linear attention: in 4 bits and in 16."""
    metal_as_opencl.need_clang()
    with pytest.MonkeyPatch.context() as patch, printing(patch):
        patch.setattr(choice, "_decided", {})
        patch.setattr(products, "has_matrix_units", lambda: True)
        for kernel in KERNELS:
            kernel.cache_clear()
        models = [tiny("moe", tmp_path_factory.mktemp("moe"), bits) for bits in (4, 16)]
        return [kernel for model in models for kernel in kernels_of(model, rows=(1, 4), steps=())]


def test_a_mixture_in_4_bits_is_metal(mixture: list[Printed]) -> None:
    assert any("const constant bfloat16_t* b_gate" in kernel.parameters for kernel in mixture), "few gates"
    assert mistakes(mixture) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, mixture: list[Printed]) -> None:
    right, wrong = FAULTS[fault]
    planted = [
        replace(kernel, header=kernel.header.replace(right, wrong, 1), source=kernel.source.replace(right, wrong, 1))
        for kernel in mixture
        if right in kernel.header or right in kernel.source
    ]
    assert planted, "the text is no longer there: plant the fault elsewhere"
    assert mistakes(planted)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("inline void f(thread float& x, const device T& y, threadgroup int (&z)[N]) { a = x & y; }", 0),
        ("a = (x) & (y); b = x[0] & 3u; c = f(x, y & z);", 0),
        ("inline void f(const float& x) {}", 1),
        ("inline void f(thread float& x, const Old &old) {}", 1),
        ("float (&line)[4] = lines[0];", 1),
        ("struct A { void f(int x) thread { if (x) {} } static int g() { return 1; } };", 0),
        ("struct A { int x[2] = {1, 2}; void f() const { g(); } float h() { return x[0]; } };", 2),
    ],
)
def test_what_opencl_allows_and_metal_does_not_is_found(text: str, found: int) -> None:
    assert len(complaints(text)) == found
