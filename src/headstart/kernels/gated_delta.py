"""The gated delta rule: ours on CUDA and CPUs, mlx-lm's kernels on Metal, its stock ops elsewhere."""

from functools import cache
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from . import cpu
from .cuda import include, on_cuda


class Inputs(NamedTuple):
    """T tokens' worth."""

    q: mx.array  # [B, T, Hk, Dk]
    k: mx.array  # [B, T, Hk, Dk]
    v: mx.array  # [B, T, Hv, Dv]
    g: mx.array  # [B, T, Hv], decay
    beta: mx.array  # [B, T, Hv]


def recurrence(inputs: Inputs, state: mx.array, mask: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """Run T tokens from `state` [B, Hv, Dv, Dk] → their outputs [B, T, Hv, Dv] and the state after them.

    A token whose `mask` [B, T] is false leaves the state as it is; its output is undefined.
    """
    metal = mx.metal.is_available() and mx.default_device() == mx.gpu and inputs.k.shape[-1] % 32 == 0
    run = gated_delta_kernel if metal else gated_delta_ops
    return run(*inputs, state, mask)


class Window(NamedTuple):
    """A layer's input, projected."""

    qkv: mx.array  # [B, W, C], before the convolution
    z: mx.array  # [B, W, Hv, Dv], the output gate
    b: mx.array  # [B, W, Hv]
    a: mx.array  # [B, W, Hv]


class Weights(NamedTuple):
    conv: mx.array  # [C, taps, 1]
    A_log: mx.array  # [Hv]
    dt_bias: mx.array  # [Hv]
    norm: mx.array  # [Dv]
    eps: float


class Drafts(NamedTuple):
    """Those of a window that are in doubt, p of them; all but `qkv` in float32, the bits they were run with."""

    qkv: mx.array  # [B, p, C], before the convolution
    k: mx.array  # [B, p, Hk, Dk]
    v: mx.array  # [B, p, Hv, Dv]
    g: mx.array  # [B, p, Hv]
    beta: mx.array  # [B, p, Hv]


class Ran(NamedTuple):
    y: mx.array  # [B, W, Hv, Dv], normed and gated
    state: mx.array  # [B, Hv, Dv, Dk], after everything certain
    conv: mx.array  # [B, taps - 1, C], likewise
    drafts: Drafts | None


def fuses(state: mx.array, dtype: mx.Dtype) -> bool:
    """Whether `fold_and_run` takes this shape on this device."""
    if cpu.native() is not None:
        return cpu.folds(state, dtype)
    _, _, Dv, Dk = state.shape
    fits = Dk % 32 == 0 and Dv % 8 == 0 and Dk <= 128 and Dv <= 128  # beyond that a block has too few registers
    return on_cuda() and fits and dtype in (mx.bfloat16, mx.float16, mx.float32)


def fold_and_run(
    window: Window,
    weights: Weights,
    state: mx.array,
    conv: mx.array,
    pending: Drafts | None,
    accepted: mx.array,
    certain: int,
) -> Ran:
    """Everything between a layer's projections, in one kernel that reads the state once and writes it once.

    Folds the `accepted` [B] first of the pending drafts and the window's first `certain` tokens, and runs the rest
    of the window from there. The stock-op twin is `models.gated_delta_net.stock`, which rounds more in between.
    """
    if (native := cpu.native()) is not None:
        y, state, conv, *fresh = native.gated_delta(
            list(window), list(weights[:-1]), weights.eps, state, conv, accepted, list(pending or ()), certain
        )
        return Ran(y, state, conv, Drafts(*fresh) if fresh else None)
    B, W, C = window.qkv.shape
    _, Hv, Dv, Dk = state.shape
    Hk, drafts, dtype = (C - Hv * Dv) // (2 * Dk), W - certain, window.qkv.dtype
    kernel = _fold_and_run(pending is not None, drafts > 0, weights.eps)
    shapes = [(B, W, Hv, Dv), state.shape, conv.shape]
    dtypes = [dtype, mx.float32, dtype]
    if drafts:
        shapes += [(B, drafts, C), (B, drafts, Hk, Dk), (B, drafts, Hv, Dv), (B, drafts, Hv), (B, drafts, Hv)]
        dtypes += [dtype, *[mx.float32] * 4]
    y, state, conv, *fresh = kernel(
        inputs=[state, conv, accepted, *window, *weights[:-1], *(pending or ())],
        # A prompt's chunks have any width: they share the kernel where everything is certain.
        template=[("T", dtype), ("HK", Hk), ("HV", Hv), ("DK", Dk), ("DV", Dv), ("TAPS", weights.conv.shape[1])]
        + ([("CERTAIN", certain)] if drafts else []),
        grid=(4 * Dv * Hv, B, 1),
        threadgroup=(4 * Dv, 1, 1),
        output_shapes=shapes,
        output_dtypes=dtypes,
    )
    return Ran(y, state, conv, Drafts(*fresh) if fresh else None)


@cache
def _fold_and_run(pending: bool, drafts: bool, eps: float):  # type: ignore[no-untyped-def]
    """The kernel by what it is given and asked for. Its sizes are template arguments, its widths come with shapes."""
    old, fresh = ([f"{prefix}_{name}" for name in Drafts._fields] for prefix in ("old", "new"))
    inputs = ["state", "conv", "accepted", *Window._fields, "conv_weight", "A_log", "dt_bias", "norm_weight"]
    outputs = ["y", "new_state", "conv_out"]
    width = "qkv_shape[1]"
    folds = f"{', '.join(old)}, old_k_shape[1]" if pending else ""
    keeps = f"{', '.join(fresh)}, {width} - CERTAIN" if drafts else ""
    call = f"""
        headstart::fold_and_run<HK, HV, DK, DV, TAPS>(
            state, conv, accepted, headstart::Drafts<const T, const float>{{{folds}}}, {", ".join(Window._fields)},
            conv_weight, A_log, dt_bias, norm_weight, {eps!r}f, {width}, {"CERTAIN" if drafts else width},
            {", ".join(outputs)}, headstart::Drafts<T, float>{{{keeps}}});
    """
    return mx.fast.cuda_kernel(
        name=f"gated_delta{'_folds' * pending}{'_drafts' * drafts}",
        input_names=inputs + old * pending,
        output_names=outputs + fresh * drafts,
        source=call,
        header=include("gated_delta"),
    )
