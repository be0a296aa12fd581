"""Kernels for Apple GPUs, the counterparts of `kernels/cuda`."""

from .choice import MOST_ROWS, Candidate, KernelCheck, checks, chosen_kernel, identity, summary
from .device import on_metal

__all__ = ["MOST_ROWS", "Candidate", "KernelCheck", "checks", "chosen_kernel", "identity", "on_metal", "summary"]
