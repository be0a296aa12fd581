"""RMS norm with a float32 weight, and the addition before it: cpu, cuda, metal or stock ops."""

import mlx.core as mx

from . import cpu, metal
from .cuda.norm import launch_norm, norm_fits
from .metal.norm import metal_norm, norm_shape


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return the norm of x [..., D], in its type."""
    if (native := cpu.native()) is not None and x.dtype in cpu.TYPES:
        return native.norm(x, weight, eps)[0]
    if norm_fits(x, weight):
        return launch_norm(False, eps, [x, weight])[0]
    if _is_metal(x, weight):
        return metal_norm(x, None, weight, eps)[0]
    return stock_norm(x, weight, eps)


def stock_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


def add_and_norm(x: mx.array, added: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Return x + added, and its norm."""
    if (native := cpu.native()) is not None and x.dtype in cpu.TYPES:
        total, normed = native.norm(x, weight, eps, added)
    elif norm_fits(x, weight):
        total, normed = launch_norm(True, eps, [x, added, weight])
    elif _is_metal(x, weight):
        total, normed = metal_norm(x, added, weight, eps)
    else:
        total = x + added
        normed = rms_norm(total, weight, eps)
    return total, normed


def _is_metal(x: mx.array, weight: mx.array) -> bool:
    return metal.on_metal() and weight.dtype == mx.float32 and metal.chosen_kernel("norm", norm_shape(x)) == "metal"
