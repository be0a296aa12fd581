"""Kernels for CPUs in C++, compiled on first use: `build.py` compiles, `load.py` loads, `kernels.h` lists them."""

from .load import VARIABLE, Loaded, available_cores, loaded, native, stock_forced
from .ops import (
    ADAPTERS,
    TYPES,
    NativeResidual,
    add_biases,
    attend_window,
    linear,
    native_attention,
    native_attention_fits,
    native_feed_forward,
    native_gated_delta,
    native_gated_delta_fits,
    native_products,
)

__all__ = [
    "ADAPTERS",
    "TYPES",
    "VARIABLE",
    "Loaded",
    "NativeResidual",
    "add_biases",
    "attend_window",
    "available_cores",
    "linear",
    "loaded",
    "native",
    "native_attention",
    "native_attention_fits",
    "native_feed_forward",
    "native_gated_delta",
    "native_gated_delta_fits",
    "native_products",
    "stock_forced",
]
