"""Fast paths per device, each beside the stock-op function that is its oracle."""

import mlx.core as mx

from . import cpu, metal
from .cuda import on_cuda


def selected() -> str:
    """Return which kernels compute on this device: native and for which CPU, or stock and why."""
    if mx.default_device() == mx.cpu:
        return str(cpu.loaded())
    return "native (cuda)" if on_cuda() else metal.kernels_in_use()
