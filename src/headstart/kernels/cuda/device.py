"""What every CUDA kernel of ours needs: its source, and whether there is a device to run it."""

import ctypes
from functools import cache
from pathlib import Path

import mlx.core as mx


def on_cuda() -> bool:
    return bool(mx.cuda.is_available()) and mx.default_device() == mx.gpu


def include(*names: str) -> str:
    """Return the header that brings in `.cu` files beside this one. Kernels are functions there; what MLX wraps is a
    call of one. MLX hashes all of a kernel's text at every launch, so the text names the files and does not hold
    them."""
    return "".join(f'#include "{Path(__file__).with_name(name)}.cu"\n' for name in names)


def launch_bounds(threads: int) -> str:
    """Return the end of a header after which kernels have as few registers as a block of `threads` leaves them. MLX
    writes the signature itself, without bounds; with more registers than these a block could not start."""
    return f"#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({threads})\n"


@cache
def resident_blocks(shared: int) -> int:
    """Return how many blocks with `shared` bytes of shared memory are on the device at once: one per multiprocessor
    that this process may use, or none where a block may not have so much."""
    driver, found = ctypes.CDLL("libcuda.so.1"), []
    for attribute in (16, 97):  # multiprocessors; shared memory of a block
        value = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0):
            return 0
        found.append(value.value)
    return found[0] if found[1] >= shared else 0
