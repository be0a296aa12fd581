"""The gated delta rule with everything between a layer's projections, in one kernel (see gated_delta.cu)."""

from functools import cache

import mlx.core as mx

from ..types import GatedDeltaWeights, Ran, Window, run_gated_delta
from .compiler import cuda_kernel
from .device import include, launch_bounds


def gated_delta_fits(state: mx.array, dtype: mx.Dtype, taps: int) -> bool:
    """Return whether `launch_gated_delta` takes a state of this shape, and a convolution of so many taps, on this
    device: beyond, a block has too few registers or too little shared memory."""
    _, _, Dv, Dk = state.shape
    fits = Dk % 32 == 0 and Dv % 8 == 0 and Dk <= 128 and Dv <= 128 and taps <= 4
    return fits and dtype in (mx.bfloat16, mx.float16, mx.float32)


def draft_lines(state: mx.array, conv: mx.array, count: int) -> tuple[tuple[int, int, int], mx.Dtype]:
    """Return the shape and type of the one array that holds `count` drafts of each row. A draft is a line: qkv in the
    type of `conv`, then k, v, g and beta in float32, padded to a multiple of 16 bytes."""
    (B, Hv, Dv, _), C = state.shape, conv.shape[-1]
    words = C * conv.itemsize // 4 + (C - Hv * Dv) // 2 + Hv * Dv + 2 * Hv
    return (B, count, -(-words // 4) * 4), mx.uint32


def launch_gated_delta(
    window: Window,
    weights: GatedDeltaWeights,
    state: mx.array,
    conv: mx.array,
    pending: list[mx.array] | None,
    accepted: mx.array,
    certain: int,
) -> Ran:
    """Fold and run a window: the state is read once and written once."""
    drafts = window.qkv.shape[1] - certain
    kernel = _gated_delta_kernel(pending is not None, drafts > 0, weights.eps)
    inputs = [state, conv, accepted, *window, *weights[:-1], *(pending or ())]
    fresh = [draft_lines(state, conv, drafts)] if drafts else []
    return run_gated_delta(kernel, inputs, window, weights, state, conv, certain, fresh)


@cache
def _gated_delta_kernel(pending: bool, drafts: bool, eps: float):  # type: ignore[no-untyped-def]
    """Return the kernel for these inputs and outputs. Its sizes are template arguments, its widths are shapes."""
    inputs = ["state", "conv", "accepted", *Window._fields, "conv_weight", "A_log", "dt_bias", "norm_weight"]
    outputs = ["y", "new_state", "conv_out"]
    width = "qkv_shape[1]"
    folds = "(const float*)old_drafts, old_drafts_shape[1]" if pending else ""
    keeps = f"(float*)new_drafts, {width} - CERTAIN" if drafts else ""
    call = f"""
        __shared__ __align__(16) unsigned char shared[sizeof(headstart::HeadTokens<DK, DV, TAPS, T, float>)];
        headstart::fold_and_run<HK, HV, DK, DV, TAPS, 1>(
            headstart::Team::block(0, 1), shared, blockIdx.x, blockIdx.y, [] {{}}, state, conv, accepted,
            headstart::Drafts<const float>{{{folds}}}, {", ".join(Window._fields)},
            conv_weight, A_log, dt_bias, norm_weight, {eps!r}f, {width}, {"CERTAIN" if drafts else width},
            {", ".join(outputs)}, headstart::Drafts<float>{{{keeps}}});
    """
    return cuda_kernel(
        name=f"gated_delta{'_folds' * pending}{'_drafts' * drafts}",
        input_names=inputs + ["old_drafts"] * pending,
        output_names=outputs + ["new_drafts"] * drafts,
        source=call,
        header=include("tensor_core", "team", "operand", "gated_delta") + launch_bounds(512),
    )
