"""Our Metal kernels on the CPU: `metal_kernel` stands in for `mx.fast.metal_kernel`, builds the same source with g++
and runs it. Where there is a clang, it checks the source with address spaces first.

The signature is put together as mlx/backend/common/metal_kernel.cpp does it: arrays of fewer than 8 elements are in
the `constant` address space, and only what the source names is declared.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from compiled import library, precompiled

HEADER = Path(__file__).with_name("metal_on_cpu.h")
NAMES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}
MOST_CONSTANT = 7  # elements
MOST_BUFFERS, MOST_THREADS = 31, 1024  # Metal's limits
FLAGS = ["-std=c++20", "-O0", "-ffp-contract=off", "-march=native", "-fPIC"]
# What Metal does not have.
FORBIDDEN = ["-Werror=vla-extension", "-Werror=vla", "-Werror=double-promotion", "-fno-exceptions", "-fno-rtti"]
CHECK = ["-std=c++20", "-D_Float16=float", *FORBIDDEN]


def metal_kernel(
    name: str,
    input_names: list[str],
    output_names: list[str],
    source: str,
    header: str = "",
    compile_options: dict[str, str] | None = None,
) -> Callable[..., list[mx.array]]:
    assert compile_options == {"math_mode": "safe"}, "anything else may reorder sums"
    # Metal has variables in threadgroup memory at the top of a kernel; C++ has static ones. They are poisoned by the
    # first thread of a threadgroup, so that what is read before it is written shows.
    declared = re.match(r"\s*threadgroup float (\w+\[[^;]*);", source)
    if declared:
        names = re.findall(r"(\w+)\[", re.sub(r"\[[^\]]*\]", "[]", declared[1]))
        poison = "".join(f"if (!self->index.x) std::memset((void*){name}, 255, sizeof {name});" for name in names)
        size = " + ".join(f"sizeof {name}" for name in names)
        limit = f"static_assert({size} <= 32768);"  # bytes of threadgroup memory, on every chip
        source = f"static {declared[0].strip()}{limit}{poison}{source[declared.end() :]}"

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
        arguments = []
        for i, (key, array) in enumerate(zip(input_names, inputs, strict=True)):
            space = "constant" if array.size <= MOST_CONSTANT else "device"
            kind = f"const {space} {NAMES[array.dtype]}*"
            arguments.append(f"auto {key} = ({kind})(pointers[{i}]);")
            if f"{key}_shape" in source:
                arguments.append(f"auto {key}_shape = (const constant int*)(shapes[{i}].at);")
            if f"{key}_ndim" in source:
                arguments.append(f"const int {key}_ndim = {array.ndim};")
        for i, (key, dtype) in enumerate(zip(output_names, output_dtypes, strict=True), len(inputs)):
            arguments.append(f"auto {key} = (device {NAMES[dtype]}*)(pointers[{i}]);")
        text = "\n".join(
            [
                '#include "metal_on_cpu.h"',
                header,
                'extern "C" void run(void** pointers, const Shape* shapes, const int* grid) {',
                *constants,
                *arguments,
                "auto at = [&](int i) { return unsigned(grid[i]); };",
                "const dim3 blocks{at(0), at(1), at(2)}, threads{at(3), at(4), at(5)};",
                "const int width = grid[6];",
                "launch(blocks, threads, false, [&] {",
                "if (int(thread_position_in_grid.x) >= width) return;",  # Metal starts no thread beyond the grid
                f"{source}\n}});\n}}",
            ]
        )
        check(text)
        buffers = sum(f"{key}{part}" in source for key in input_names for part in ("", "_shape", "_ndim"))
        assert buffers + len(output_names) <= MOST_BUFFERS
        assert threadgroup[0] * threadgroup[1] * threadgroup[2] <= MOST_THREADS
        arrays = [np.array(a.view(mx.uint16) if a.itemsize == 2 else a, order="C") for a in inputs]
        for shape, dtype in zip(output_shapes, output_dtypes, strict=True):  # poisoned: what is not written shows
            arrays.append(
                np.full(shape, 0x7FFF, np.uint16) if dtype.size == 2 else np.full(shape, np.nan, np.float32)
            )
        pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
        shapes = np.array([[*array.shape, *[0] * (10 - array.ndim)] for array in arrays], np.int32)
        blocks = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
        launch = np.array([*blocks, *threadgroup, grid[0]], np.int32)
        library(text, HEADER, *FLAGS).run(
            pointers, ctypes.c_void_p(shapes.ctypes.data), ctypes.c_void_p(launch.ctypes.data)
        )
        outputs = zip(arrays[len(inputs) :], output_dtypes, strict=True)
        return [mx.array(array).view(dtype) for array, dtype in outputs]

    return call


@cache
def check(text: str) -> None:
    """Compile with clang, where there is one, without what Metal does not have."""
    if shutil.which("clang++") is None or sys.platform == "darwin":
        return
    header = ["-include-pch", str(precompiled("clang++", HEADER, *CHECK) / f"{HEADER.name}.gch")]
    command = ["clang++", "-x", "c++", *CHECK, *header, f"-I{HEADER.parent}", "-fsyntax-only", "-"]
    subprocess.run(command, input=text, text=True, check=True)
