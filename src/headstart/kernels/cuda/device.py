"""What every CUDA kernel of ours needs: its source, and whether there is a device to run it."""

import ctypes
from functools import cache
from pathlib import Path


def include(*names: str) -> str:
    """Return the header that brings in `.cu` files beside this one. Kernels are functions there; what MLX wraps is a
    call of one. MLX hashes all of a kernel's text at every launch, so the text names the files and does not hold
    them."""
    return "".join(f'#include "{Path(__file__).with_name(name)}.cu"\n' for name in names)


def launch_bounds(threads: int, blocks: int = 1) -> str:
    """Return the end of a header after which kernels have as few registers as `blocks` of `threads` on a
    multiprocessor leave them. MLX writes the signature itself, without bounds; with more registers than these a block
    could not start."""
    return f"#undef __global__\n#define __global__ __attribute__((global)) __launch_bounds__({threads}, {blocks})\n"


@cache
def device_attribute(number: int) -> int:
    """Return an attribute of the device by its number in CUDA's driver; 0 where the driver does not say."""
    value, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
    return 0 if failed else value.value


def multiprocessors() -> int:
    """Return how many of them the driver reports for this process."""
    return device_attribute(16)


def resident_blocks(shared: int) -> int:
    """Return how many blocks with `shared` bytes of shared memory are on the device at once: one per multiprocessor
    that this process may use, or none where a block may not have so much."""
    shared_of_a_block = device_attribute(97)
    return multiprocessors() if shared_of_a_block >= shared else 0
