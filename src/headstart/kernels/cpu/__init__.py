"""Kernels for CPUs in C++, compiled on first use: `build.py` compiles, `load.py` loads, `kernels.h` lists them."""

from .load import Loaded, loaded, native
from .ops import TYPES, attend, attends, folds, multiplies, products

__all__ = ["TYPES", "Loaded", "attend", "attends", "folds", "loaded", "multiplies", "native", "products"]
