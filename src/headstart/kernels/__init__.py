"""The operations of a step. `backend.py` is the reference; each folder is what one device does better.

`choose_backend` is the only place where a device is asked for.
"""

import mlx.core as mx

from .backend import Backend


def choose_backend() -> Backend:
    """Return the backend of MLX's default device, the same one as long as nothing about it changes."""
    if mx.default_device() == mx.cpu:
        from .cpu.backend import cpu_backend

        return cpu_backend()
    if mx.cuda.is_available():
        from .cuda.backend import cuda_backend

        return cuda_backend()
    if mx.metal.is_available():
        from .metal.backend import metal_backend

        return metal_backend()
    return Backend(f"stock ({mx.default_device()} is no device with kernels)")


__all__ = ["Backend", "choose_backend"]
