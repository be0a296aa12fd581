"""Kernels for CPUs in C++, compiled on first use: `build.py` compiles, `load.py` loads, `kernels.h` lists them."""

from .load import Loaded, loaded, native
from .ops import TYPES, attend, attends, folds, kind, products

__all__ = ["TYPES", "Loaded", "attend", "attends", "folds", "kind", "loaded", "native", "products"]
