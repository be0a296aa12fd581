"""The gated delta rule with everything between a layer's projections, in one kernel (see gated_delta.cu)."""

from functools import cache

import mlx.core as mx

from ..types import Drafts, GatedDeltaWeights, Ran, Window
from .device import launch, make_kernel, on_cuda


def gated_delta_fits(state: mx.array, dtype: mx.Dtype) -> bool:
    """Return whether `launch_gated_delta` takes a state of this shape on this device."""
    _, _, Dv, Dk = state.shape
    fits = Dk % 32 == 0 and Dv % 8 == 0 and Dk <= 128 and Dv <= 128  # beyond that a block has too few registers
    return on_cuda() and fits and dtype in (mx.bfloat16, mx.float16, mx.float32)


def launch_gated_delta(
    window: Window,
    weights: GatedDeltaWeights,
    state: mx.array,
    conv: mx.array,
    pending: Drafts | None,
    accepted: mx.array,
    certain: int,
) -> Ran:
    """Fold and run a window: the state is read once and written once."""
    B, W, C = window.qkv.shape
    _, Hv, Dv, Dk = state.shape
    Hk, drafts, dtype = (C - Hv * Dv) // (2 * Dk), W - certain, window.qkv.dtype
    outputs = [((B, W, Hv, Dv), dtype), (state.shape, mx.float32), (conv.shape, dtype)]
    template = {"T": dtype, "HK": Hk, "HV": Hv, "DK": Dk, "DV": Dv, "TAPS": weights.conv.shape[1]}
    if drafts:  # a prompt's chunks have any width: they share the kernel where everything is certain
        template["CERTAIN"] = certain
        shapes = [(B, drafts, Hk, Dk), (B, drafts, Hv, Dv), (B, drafts, Hv), (B, drafts, Hv)]
        outputs += [((B, drafts, C), dtype), *((shape, mx.float32) for shape in shapes)]
    kernel = _gated_delta_kernel(pending is not None, drafts > 0, weights.eps)
    inputs = [state, conv, accepted, *window, *weights[:-1], *(pending or ())]
    y, state, conv, *fresh = launch(kernel, inputs, template, (Hv, B, 1), 4 * Dv, outputs)
    return Ran(y, state, conv, Drafts(*fresh) if fresh else None)


@cache
def _gated_delta_kernel(pending: bool, drafts: bool, eps: float):  # type: ignore[no-untyped-def]
    """Return the kernel for these inputs and outputs. Its sizes are template arguments, its widths are shapes."""
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
    name = f"gated_delta{'_folds' * pending}{'_drafts' * drafts}"
    return make_kernel(
        name, " ".join(inputs + old * pending), " ".join(outputs + fresh * drafts), "gated_delta", call
    )
