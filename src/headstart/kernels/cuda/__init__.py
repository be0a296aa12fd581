"""Kernels for NVIDIA cards. Beside every `.cu` file a module of its name launches what it holds."""

from .device import on_cuda

__all__ = ["on_cuda"]
