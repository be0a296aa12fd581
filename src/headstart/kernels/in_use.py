"""Which product each layer takes, and why where it is not ours."""

import mlx.core as mx
import mlx.nn as nn

from .cuda import on_cuda
from .products import refusal, weights_of


def products_in_use(module: nn.Module, dtype: mx.Dtype) -> dict[str, str]:
    """By the path of every matrix in `module`, for activations of type `dtype` while tokens are decoded."""
    return {path: _choice(leaf, dtype) for path, leaf in module.named_modules() if _multiplies(leaf)}


def _multiplies(leaf: nn.Module) -> bool:
    return "weight" in leaf and leaf.weight.ndim >= 2 and not isinstance(leaf, nn.Conv1d)


def _choice(leaf: nn.Module, dtype: mx.Dtype) -> str:
    weights = weights_of(leaf)
    reason = refusal(dtype, weights) if on_cuda() else "there is no CUDA device"
    if reason is not None:
        return f"mlx's, as {reason}"
    return "ours, 16 bits" if weights.scales is None else f"ours, {weights.bits} bits in groups of {weights.group}"
