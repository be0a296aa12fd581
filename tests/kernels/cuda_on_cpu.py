"""Our CUDA kernels on the CPU: `cuda_kernel` stands in for `mx.fast.cuda_kernel` and builds the same source with g++.

So the kernels themselves are under test on any machine, down to their bits (see cuda_on_cpu.h for what may differ).
The signature is put together as mlx/backend/cuda/custom_kernel.cpp does it. Slow: for tiny shapes.
"""

import ctypes
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from compiled import library
from headstart.kernels.cpu.backend import CpuBackend
from headstart.kernels.cuda import persistent
from headstart.kernels.cuda.steps import CudaSteps
from headstart.models import Model

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-march=native", "-fPIC"]
NAMES = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
}


@cache
def load_threads() -> None:
    """Load what kernels call to run their threads, for them to find."""
    made = library(HEADER.with_suffix(".cpp").read_text(), HEADER, *FLAGS)
    ctypes.CDLL(made._name, ctypes.RTLD_GLOBAL)


class StepsOnCpu(CudaSteps, CpuBackend):
    """Drafts and acceptance by the kernels for CUDA, layers by those for this CPU."""


def steps_on_cpu(model: Model) -> Model:
    assert isinstance(model.backend, CpuBackend), "needs the native CPU kernels"
    return replace(model, backend=StepsOnCpu(model.backend.native))


@contextmanager
def emulated() -> Iterator[pytest.MonkeyPatch]:
    """Build the kernels for CUDA for this CPU. Layers take several of them: no block is resident."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
        patch.setattr(persistent, "resident_blocks", lambda shared: 0)
        forget_kernels("cuda")
        yield patch
    forget_kernels("cuda")


def forget_kernels(device: str) -> None:
    """Have the kernels of a folder made anew: their functions remember them."""
    package = f"headstart.kernels.{device}."
    for module in [module for name, module in sys.modules.items() if name.startswith(package)]:
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and function.__module__ == module.__name__:
                function.cache_clear()


def cuda_kernel(
    name: str, input_names: list[str], output_names: list[str], source: str, header: str = "", shared_memory: int = 0
) -> Callable[..., list[mx.array]]:
    files = [Path(file) for file in re.findall(r'#include "(.*)"', header)]
    # What the tensor cores do stands in cuda_on_cpu.h.
    header = "".join(file.read_text() for file in files if file.stem not in ("tensor_core", "warpgroup"))
    declared = re.compile(r"extern __shared__ __align__\((\d+)\) unsigned char dynamic_shared\[\];")
    alignment = max(map(int, declared.findall(header + source)), default=16)
    header, source = (declared.sub("", text) for text in (header, source))
    together = "headstart::Grid" in source  # blocks wait for each other

    def call(
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, int | bool | mx.Dtype]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        constants = [
            f"using {key} = {NAMES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr int {key} = {int(value)};"
            for key, value in template
        ]
        dtypes = [*(array.dtype for array in inputs), *output_dtypes]
        unpack = [
            f"auto {key} = static_cast<{'const ' * (i < len(inputs))}{NAMES[dtype]}*>(pointers[{i}]); "
            f"const Shape& {key}_shape = shapes[{i}]; "
            f"const int {key}_ndim = {len(output_shapes[i - len(inputs)]) if i >= len(inputs) else inputs[i].ndim};"
            for i, (key, dtype) in enumerate(zip([*input_names, *output_names], dtypes, strict=True))
        ]
        text = "\n".join(
            [
                '#include "cuda_on_cpu.h"',  # first: after a definition g++ would not take the precompiled one
                f"#define SHARED_ALIGNMENT {alignment}",
                header,
                'extern "C" void run(void** pointers, const Shape* shapes, const int* grid) {',
                *constants,
                *unpack,
                "const dim3 blocks{unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])}, "
                "threads{unsigned(grid[3]), unsigned(grid[4]), unsigned(grid[5])};",
                f"launch(blocks, threads, {str(together).lower()}, [&] {{ {source} }});\n}}",
            ]
        )
        # Outputs are poisoned, so that an element that nobody wrote shows.
        arrays = [np.array(a.view(mx.uint16) if a.itemsize == 2 else a, order="C") for a in inputs]
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):
            arrays.append(
                np.full(shape, 0x7FFF, np.uint16) if dtype.size == 2 else np.full(shape, np.nan, np.float32)
            )
        pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
        shapes = np.array([[*array.shape, *[0] * (10 - array.ndim)] for array in arrays], np.int32)
        blocks = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
        launch = np.array([*blocks, *threadgroup], np.int32)
        load_threads()
        library(text, HEADER, *FLAGS).run(
            pointers, ctypes.c_void_p(shapes.ctypes.data), ctypes.c_void_p(launch.ctypes.data)
        )
        for name, array, after in zip(input_names, inputs, arrays, strict=False):
            if f"const_cast<T*>({name})" in source:  # written in place
                np.asarray(memoryview(array.view(mx.uint16)))[...] = after
        outputs = zip(arrays[len(inputs) :], output_dtypes, strict=True)
        return [mx.array(array).view(dtype) for array, dtype in outputs]

    return call
