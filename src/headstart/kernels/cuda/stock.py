"""Have MLX compile those of its own kernels that every step needs, side by side.

MLX compiles each of them when it is first evaluated: one at a time, three seconds each. It keeps them in a folder, so
processes that evaluate one operation each fill it together.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

SECONDS = 60
OPERATIONS = {  # what has MLX compile a kernel, by the kernel's name; T: the type of a model
    "gather_T_int32_1": "mx.take(mx.zeros((2, 2), mx.T), mx.array([1]), axis=0)",
    "gather_T_uint32_1": "mx.take(mx.zeros((2, 2), mx.T), mx.array([1], mx.uint32), axis=0)",
    "gather_int32_int32_1": "mx.take(mx.zeros((2, 2), mx.int32), mx.array([1]), axis=0)",
    "gather_int32_uint32_1": "mx.take(mx.zeros((2, 2), mx.int32), mx.array([1], mx.uint32), axis=0)",
    "gather_float32_int32_1": "mx.take(mx.zeros((2, 2)), mx.array([1]), axis=0)",
    "gather_axis_T_int32": "mx.take_along_axis(mx.zeros((2, 2), mx.T), mx.array([[1], [0]]), axis=1)",
    "gather_axis_int32_int32": "mx.take_along_axis(mx.zeros((2, 2), mx.int32), mx.array([[1], [0]]), axis=1)",
    "scatter_axis_T_int32_Assign": (
        "mx.put_along_axis(mx.zeros((2, 2), mx.T), mx.array([[1], [0]]), mx.ones((2, 1), mx.T), axis=1)"
    ),
    "scatter_axis_int32_int32_Assign": (
        "mx.put_along_axis(mx.zeros((2, 2), mx.int32), mx.array([[1], [0]]), mx.ones((2, 1), mx.int32), axis=1)"
    ),
    "compute_dynamic_offset_int32_1": "mx.slice(mx.zeros((4,)), mx.array([1]), [0], [2])",
}


@contextmanager
def stock_kernels_compiled(dtype: mx.Dtype, folder: Path) -> Iterator[None]:
    """Compile what the folder lacks for a model of this type, meanwhile. What fails is left to MLX."""
    name = str(dtype).removeprefix("mlx.core.")
    missing = [
        expression.replace("mx.T", f"mx.{name}")
        for kernel, expression in OPERATIONS.items()
        if not (folder / f"{kernel.replace('_T_', f'_{name}_')}.ptx").exists()
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"import mlx.core as mx; mx.eval({expression})"], stderr=subprocess.DEVNULL
        )
        for expression in missing
    ]
    try:
        yield
        for process in processes:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
