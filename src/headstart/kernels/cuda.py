"""What every CUDA kernel of ours needs: its source, and whether there is a device to run it."""

import re
from pathlib import Path

import mlx.core as mx


def on_cuda() -> bool:
    return bool(mx.cuda.is_available()) and mx.default_device() == mx.gpu


def source(name: str) -> str:
    """The text of a `.cu` file beside this one. Kernels are functions there; what MLX wraps is a call of one.

    MLX hashes all of it at every launch, so comments and indentation stay behind.
    """
    text = (Path(__file__).parent / f"{name}.cu").read_text()
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"//.*", "", text))


TENSOR_CORE = source("tensor_core")  # the header of kernels that use them; tests run without the hardware
