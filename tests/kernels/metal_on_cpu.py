"""Our Metal kernels on the CPU: `metal_kernel` stands in for `mx.fast.metal_kernel`, builds the same source with g++
and runs it when its outputs are computed. Address spaces and what Metal lacks are checked on the text that MLX itself
makes: `metal_as_opencl.py`.

The signature is put together as mlx/backend/common/metal_kernel.cpp does it: arrays of fewer than 8 elements are in
the `constant` address space, and only what the source names is declared.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
from cuda_on_cpu import load_threads
from launches import launch

from compiled import library

HEADER = Path(__file__).with_name("metal_on_cpu.h")
NAMES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}
MOST_CONSTANT = 7  # elements
MOST_BUFFERS, MOST_THREADS = 31, 1024  # Metal's limits
FLAGS = ["-std=c++20", "-O0", "-ffp-contract=off", "-march=native", "-fPIC"]


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
    declared = re.match(r"(\s*threadgroup [\w:]+ \w+\[[^;]*;)+", source)
    if declared:
        names = re.findall(r"(\w+)\[", re.sub(r"\[[^\]]*\]", "[]", declared[0]))
        poison = "".join(f"if (!self->index.x) std::memset((void*){name}, 255, sizeof {name});" for name in names)
        size = " + ".join(f"sizeof {name}" for name in names)
        limit = f"static_assert({size} <= 32768);"  # bytes of threadgroup memory, on every chip
        memory = declared[0].replace("threadgroup ", "static threadgroup ")
        source = f"{memory}{limit}{poison}{source[declared.end() :]}"

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
                re.sub(r"#include <[mM]etal.*>", "", header),
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
        buffers = sum(f"{key}{part}" in source for key in input_names for part in ("", "_shape", "_ndim"))
        assert buffers + len(output_names) <= MOST_BUFFERS
        assert threadgroup[0] * threadgroup[1] * threadgroup[2] <= MOST_THREADS
        blocks = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
        load_threads()
        run = ctypes.cast(library(text, HEADER, *FLAGS).run, ctypes.c_void_p).value
        return launch(inputs, output_shapes, output_dtypes, run, [*blocks, *threadgroup, grid[0]])

    return call
