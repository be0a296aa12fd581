"""CUDA kernels are compiled before MLX would, and put where it looks. Whether it takes them only a card can show."""

import logging
import math
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Barrier
from typing import Any

import mlx.core as mx
import pytest

from headstart.kernels.cache import cache_folder
from headstart.kernels.cuda import compiler, stock
from headstart.kernels.cuda.compiler import (
    CACHE_HINTS,
    compiled_folder,
    compiled_together,
    cuda_kernel,
    keep_compiled_kernels,
    kernel_text,
    standard_hash,
)

# As mlx/backend/cuda/custom_kernel.cpp (0.32) puts it together.
EXPECTED = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// stamp
#include "a.cu"
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_twice_bfloat16_t_3(
    const __nv_bfloat16* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ int x_ndim,
    const float* w,
    __nv_bfloat16* y,
    int32_t* z) {
  using T = __nv_bfloat16;
  constexpr int N = 3;

y[0] = T(x_shape[x_ndim - 1] * N);
}

} // namespace mlx::core::cu
"""
NAME = "custom_kernel_twice_bfloat16_t_3"


@pytest.fixture(autouse=True)
def simulated_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "ptx"))
    if mx.cuda.is_available():
        return
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)

    def made(output_shapes: list[tuple[int, ...]], output_dtypes: list[mx.Dtype], **given: Any) -> list[mx.array]:
        return [mx.arange(math.prod(shape)).reshape(shape) for shape in output_shapes]

    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **text: made)
    monkeypatch.setattr(compiler, "version", lambda package: "0.32.4")
    monkeypatch.setattr(compiler, "_stamp", lambda: "stamp")
    compiler._warn.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were given to the compiler."""
    texts: list[str] = []

    def compile_text(kernel: str, text: str) -> tuple[bytes, str]:
        assert kernel == f"mlx::core::cu::{NAME}"
        texts.append(text)
        return b"\x7fELF code", "_Z5twice"

    monkeypatch.setattr(compiler, "compile_text", compile_text)
    return texts


def twice() -> Callable[..., list[mx.array]]:
    source = "y[0] = T(x_shape[x_ndim - 1] * N);"
    kernel: Callable[..., list[mx.array]] = cuda_kernel("twice", ["x", "w"], ["y", "z"], source, '#include "a.cu"\n')
    return kernel


def run(kernel: Callable[..., list[mx.array]], number: int = 3, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    given: dict[str, Any] = {"inputs": [mx.ones((2,), dtype), mx.ones((2,))], "output_dtypes": [dtype, mx.int32]}
    return kernel(**given, template=[("T", dtype), ("N", number)], output_shapes=[(2,)] * 2)[0]


def test_the_hash_is_that_of_cpp() -> None:
    assert standard_hash(b"hello") == 0x26553298FDBE39C8  # std::hash<std::string>{}("hello")


@pytest.mark.parametrize("read_by_host", [False, True])
def test_small_outputs_are_parts_of_larger_arrays_unless_the_host_reads_them(
    monkeypatch: pytest.MonkeyPatch, read_by_host: bool
) -> None:
    """MLX keeps small arrays, and those that the host has read, where a kernel reads them slowly."""
    asked: list[list[tuple[int, ...]]] = []

    def made(output_shapes: list[tuple[int, ...]], **given: Any) -> list[mx.array]:
        asked.append(output_shapes)
        return [mx.arange(math.prod(shape)).reshape(shape) for shape in output_shapes]

    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **text: made)
    monkeypatch.setattr(compiler, "_compile_once", lambda *text: None)
    kernel = cuda_kernel("twice", [], ["y", "z", "w"], "", "", read_by_host=read_by_host)
    shapes, dtypes = [(2, 1), (64, 16), (0,)], [mx.int32, mx.int32, mx.bfloat16]
    found = kernel(inputs=[], template=[], output_shapes=shapes, output_dtypes=dtypes)
    assert [array.shape for array in found] == shapes
    assert found[0].tolist() == [[0], [1]]
    assert asked == [shapes if read_by_host else [(1024, 1), (64, 16), (2048,)]]


def test_a_kernel_is_put_where_mlx_looks_for_it_once(compiled: list[str]) -> None:
    kernel = twice()
    assert run(kernel).tolist() == [0, 1]
    assert compiled == [CACHE_HINTS + EXPECTED]
    path = compiled_folder() / f"{NAME}_{standard_hash(EXPECTED.encode()):x}.ptx"
    assert path.read_bytes() == b"\x7fELF code"
    assert path.with_suffix(".txt").read_text() == f"mlx::core::cu::{NAME}\t_Z5twice\n"
    assert len(list(compiled_folder().iterdir())) == 2
    run(kernel)
    run(twice())  # as in another process
    assert len(compiled) == 1
    path.write_bytes(b"")  # of a machine that lost its power
    run(twice())
    assert len(compiled) == 2
    assert path.read_bytes()


def test_a_kernel_without_template_arguments_has_the_text_that_mlx_gives_it() -> None:
    name, text = kernel_text("twice", "", "    int32_t* y", [], "y[0] = 2;")
    assert name == "custom_kernel_twice"
    assert text.endswith(
        "void custom_kernel_twice(\n    int32_t* y) {\ny[0] = 2;\n}\n\n} // namespace mlx::core::cu\n"
    )


def test_every_form_of_a_kernel_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def compile_text(kernel: str, text: str) -> tuple[bytes, str]:
        names.append(kernel.removeprefix("mlx::core::cu::custom_kernel_"))
        return b"\x7fELF", ""

    monkeypatch.setattr(compiler, "compile_text", compile_text)
    kernel = twice()
    for number, dtype in ((3, mx.bfloat16), (4, mx.bfloat16), (3, mx.float16), (3, mx.float32), (4, mx.bfloat16)):
        run(kernel, number, dtype)
    assert names == ["twice_bfloat16_t_3", "twice_bfloat16_t_4", "twice_float16_t_3", "twice_float_3"]


def test_kernels_are_compiled_side_by_side_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Barrier(3, timeout=60)

    def compile_text(kernel: str, text: str) -> tuple[bytes, str]:
        together.wait()  # until the others are here
        return b"\x7fELF", ""

    monkeypatch.setattr(compiler, "compile_text", compile_text)
    kernel = twice()
    with compiled_together(mx.bfloat16):
        for number in range(3):
            run(kernel, number)
    assert len(list(compiled_folder().glob("*.ptx"))) == 3
    monkeypatch.setattr(compiler, "compile_text", lambda kernel, text: (b"\x7fELF", ""))
    run(kernel, 4)  # described outside: ready when it is evaluated
    assert len(list(compiled_folder().glob("*.ptx"))) == 4


def test_a_copy_that_the_compiler_got_wrong_is_compiled_without_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two instructions of an H200: a copy to [R29], and one to [R31 + UR10]."""
    right, wrong = ((0x00000000761D7FAE, 0x0003E8000B901D44), (0x00000000781F7DAE, 0x0003E4000B901D4A))
    texts: list[str] = []

    def compile_text(kernel: str, text: str) -> tuple[bytes, str]:
        texts.append(text)
        return b"\x7fELF" + bytes(60) + struct.pack("<4Q", *right, *(wrong if CACHE_HINTS in text else right)), ""

    monkeypatch.setattr(compiler, "compile_text", compile_text)
    run(twice())
    assert texts == [CACHE_HINTS + EXPECTED, EXPECTED]
    (stored,) = compiled_folder().glob("*.ptx")
    assert stored.read_bytes().endswith(struct.pack("<4Q", *right, *right))


@pytest.mark.parametrize("fault", ["compiler", "folder", "type"])
def test_what_cannot_be_compiled_is_left_to_mlx(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(kernel: str, text: str) -> tuple[bytes, str]:
        raise RuntimeError("kernel.cu(3): error: no such name")

    def succeeds(kernel: str, text: str) -> tuple[bytes, str]:
        return b"\x7fELF", ""

    monkeypatch.setattr(compiler, "compile_text", fails if fault == "compiler" else succeeds)
    if fault == "folder":
        compiled_folder().write_text("a file, no folder")
    kernel, dtype = twice(), mx.int64 if fault == "type" else mx.bfloat16
    with caplog.at_level(logging.WARNING, "headstart"):
        for number in range(3):
            assert run(kernel, number, dtype).tolist() == [0, 1]
    assert caplog.text.count("left to MLX to compile") == 1


def test_another_mlx_compiles_its_kernels_itself(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    monkeypatch.setattr(compiler, "version", lambda package: "0.33.0")
    run(twice())
    assert not compiled


def test_kernels_are_kept_in_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "_architecture", lambda: "sm_90a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_kernels()
    assert compiled_folder() == tmp_path / "ptx"  # as the user says
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    keep_compiled_kernels()
    assert compiled_folder() == cache_folder() / "mlx-0.32.4-sm_90a"
    assert compiled_folder().stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "_architecture", lambda: "sm_90a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    folder = cache_folder() / "mlx-0.32.4-sm_90a"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    keep_compiled_kernels()
    assert "MLX_PTX_CACHE_DIR" not in os.environ
    assert "can be written by others" in caplog.text


def test_a_user_without_a_home_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in ("XDG_CACHE_HOME", "MLX_PTX_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    keep_compiled_kernels()
    assert "MLX_PTX_CACHE_DIR" not in os.environ
    assert "Could not determine home" in caplog.text


@pytest.mark.parametrize("kernel", stock.OPERATIONS)
def test_what_has_mlx_compile_its_kernels_can_be_computed(kernel: str) -> None:
    made = eval(stock.OPERATIONS[kernel].replace("mx.T", "mx.bfloat16"), {"mx": mx})
    mx.eval(made)
    assert str(made.dtype) in ("mlx.core.bfloat16", "mlx.core.float32", "mlx.core.int32")


def test_only_kernels_of_mlx_that_are_missing_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = "from pathlib import Path; Path({!r}).write_text('')"
    names = ["gather_T_int32_1", "gather_axis_T_int32", "gather_int32_int32_1"]
    made = {name: tmp_path / f"made_{name}" for name in names}
    monkeypatch.setattr(stock, "OPERATIONS", {n: f"0); {written.format(str(p))}; (0" for n, p in made.items()})
    (tmp_path / "gather_axis_bfloat16_int32.ptx").write_text("")
    with stock.stock_kernels_compiled(mx.bfloat16, tmp_path):
        pass
    assert [name for name in names if made[name].exists()] == ["gather_T_int32_1", "gather_int32_int32_1"]


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stock, "OPERATIONS", {"gather_T_int32_1": "__import__('time').sleep(600)"})
    monkeypatch.setattr(stock, "SECONDS", 0)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with stock.stock_kernels_compiled(mx.bfloat16, tmp_path):
        pass
    assert started[0].returncode == -9


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("template", [[("N", 1)], []])
def test_mlx_runs_what_was_compiled_for_it(monkeypatch: pytest.MonkeyPatch, template: list[tuple[str, int]]) -> None:
    """Code of another text under the name of this one shows who was asked."""
    compile_text = compiler.compile_text
    monkeypatch.setattr(compiler, "compile_text", lambda name, text: compile_text(name, text.replace("1.5f", "2.5f")))
    kernel = cuda_kernel("add", ["x"], ["y"], "y[threadIdx.x] = x[threadIdx.x] + 1.5f;", "")
    given: dict[str, Any] = {"inputs": [mx.zeros((32,))], "output_shapes": [(32,)], "output_dtypes": [mx.float32]}
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")  # MLX reads it once
    made = kernel(**given, template=template, grid=(32, 1, 1), threadgroup=(32, 1, 1))[0]
    assert made.tolist() == [2.5] * 32
