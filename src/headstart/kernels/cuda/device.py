"""What every CUDA kernel of ours needs: its source, and whether there is a device to run it."""

from pathlib import Path

import mlx.core as mx


def on_cuda() -> bool:
    return bool(mx.cuda.is_available()) and mx.default_device() == mx.gpu


def include(*names: str) -> str:
    """Return the header that brings in `.cu` files beside this one. Kernels are functions there; what MLX wraps is a
    call of one. MLX hashes all of a kernel's text at every launch, so the text names the files and does not hold
    them."""
    return "".join(f'#include "{Path(__file__).with_name(name)}.cu"\n' for name in names)
