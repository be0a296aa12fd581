"""Kernels for CPUs in C++, compiled on first use: `build.py` compiles, `load.py` loads, `kernels.h` lists them."""

from .attention import (
    Heads,
    attend_window,
    gated_heads,
    grouped_heads,
    native_attention,
    native_grouped_attention,
    native_latent_attention,
)
from .load import VARIABLE, Loaded, available_cores, loaded, native, stock_forced
from .ops import (
    ADAPTERS,
    TYPES,
    NativeResidual,
    linear,
    native_feed_forward,
    native_gated_delta,
    native_gated_delta_fits,
    native_products,
)

__all__ = [
    "ADAPTERS",
    "TYPES",
    "VARIABLE",
    "Heads",
    "Loaded",
    "NativeResidual",
    "attend_window",
    "available_cores",
    "gated_heads",
    "grouped_heads",
    "linear",
    "loaded",
    "native",
    "native_attention",
    "native_feed_forward",
    "native_gated_delta",
    "native_gated_delta_fits",
    "native_grouped_attention",
    "native_latent_attention",
    "native_products",
    "stock_forced",
]
