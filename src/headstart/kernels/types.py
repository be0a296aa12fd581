"""What kernels are given and give back, on every device, and the launch that CUDA and Metal share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn


class ArrangedHeads(NamedTuple):
    """Queries, keys and values of a window by head, normed and rotated."""

    queries: mx.array  # [B, H, W, D]
    keys: mx.array  # [B, Hkv, W, D]
    values: mx.array  # [B, Hkv, W, D]


class HeadNorms(NamedTuple):
    queries: mx.array  # [D]
    keys: mx.array  # [D]
    eps: float


class Window(NamedTuple):
    """The input of a GatedDeltaNet layer, projected."""

    qkv: mx.array  # [B, W, C], before the convolution
    z: mx.array  # [B, W, Hv, Dv], the output gate
    b: mx.array  # [B, W, Hv]
    a: mx.array  # [B, W, Hv]


class GatedDeltaWeights(NamedTuple):
    conv: mx.array  # [C, taps, 1]
    A_log: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]
    norm: mx.array  # [Dv]
    eps: float

    @classmethod
    def of(cls, net: nn.Module) -> "GatedDeltaWeights":
        """Return those of mlx-lm's module."""
        return cls(net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight, net.norm.eps)


class PendingDrafts(NamedTuple):
    """Those of a window that are in doubt, p of them; all but `qkv` in float32, the bits they were run with. The
    kernels for CUDA hold them in one array (see `cuda/gated_delta.py`)."""

    qkv: mx.array  # [B, p, C], before the convolution
    k: mx.array  # [B, p, Hk, Dk]
    v: mx.array  # [B, p, Hv, Dv]
    g: mx.array  # [B, p, Hv]
    beta: mx.array  # [B, p, Hv]


class Ran(NamedTuple):
    """What a GatedDeltaNet layer makes of a window."""

    y: mx.array  # [B, W, Hv, Dv], normed and gated
    state: mx.array  # [B, Hv, Dv, Dk], after everything certain
    conv: mx.array  # [B, taps - 1, C], likewise
    drafts: list[mx.array] | None  # those in doubt, as the device has them


def run_gated_delta(
    kernel: Any,
    inputs: list[mx.array],
    window: Window,
    weights: GatedDeltaWeights,
    state: mx.array,
    conv: mx.array,
    certain: int,
    drafts: Sequence[tuple[Sequence[int], mx.Dtype]],
) -> Ran:
    """Launch a kernel of CUDA or Metal: a threadgroup for each head of each sequence, four threads for each value.
    `drafts` are the shapes and types of those in doubt."""
    B, W, C = window.qkv.shape
    _, Hv, Dv, Dk = state.shape
    Hk, dtype = (C - Hv * Dv) // (2 * Dk), window.qkv.dtype
    outputs = [((B, W, Hv, Dv), dtype), (state.shape, mx.float32), (conv.shape, dtype), *drafts]
    template = [("T", dtype), ("HK", Hk), ("HV", Hv), ("DK", Dk), ("DV", Dv), ("TAPS", weights.conv.shape[1])]
    if drafts:  # a prompt's chunks have any width: they share the kernel where everything is certain
        template += [("CERTAIN", certain)]
    y, state, conv, *fresh = kernel(
        inputs=inputs,
        template=template,
        grid=(4 * Dv * Hv, B, 1),
        threadgroup=(4 * Dv, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    return Ran(y, state, conv, fresh or None)


def at_last(x: mx.array, last: mx.array | None, axis: int = 1) -> mx.array:
    """Return x at index `last` [B] of each row along an axis, which stays with a length of one; all of x for None."""
    return x if last is None else mx.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), axis=axis)
