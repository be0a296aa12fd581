"""The gated delta rule with everything between a layer's projections, in one kernel (see gated_delta.cu)."""

from functools import cache

import mlx.core as mx

from ..types import Drafts, GatedDeltaWeights, Ran, Window, run_gated_delta
from .compiler import cuda_kernel
from .device import include, launch_bounds, on_cuda


def gated_delta_fits(state: mx.array, dtype: mx.Dtype, taps: int) -> bool:
    """Return whether `launch_gated_delta` takes a state of this shape, and a convolution of so many taps, on this
    device: beyond, a block has too few registers or too little shared memory."""
    _, _, Dv, Dk = state.shape
    fits = Dk % 32 == 0 and Dv % 8 == 0 and Dk <= 128 and Dv <= 128 and taps <= 4
    return on_cuda() and fits and dtype in (mx.bfloat16, mx.float16, mx.float32)


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
    kernel = _gated_delta_kernel(pending is not None, window.qkv.shape[1] > certain, weights.eps)
    inputs = [state, conv, accepted, *window, *weights[:-1], *(pending or ())]
    return run_gated_delta(kernel, inputs, window, weights, state, conv, certain)


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
        __shared__ __align__(16) unsigned char shared[sizeof(headstart::HeadTokens<DK, DV, TAPS, T, float>)];
        headstart::fold_and_run<HK, HV, DK, DV, TAPS, 1>(
            headstart::Team::block(0, 1), shared, blockIdx.x, blockIdx.y, [] {{}}, state, conv, accepted,
            headstart::Drafts<const T, const float>{{{folds}}}, {", ".join(Window._fields)},
            conv_weight, A_log, dt_bias, norm_weight, {eps!r}f, {width}, {"CERTAIN" if drafts else width},
            {", ".join(outputs)}, headstart::Drafts<T, float>{{{keeps}}});
    """
    return cuda_kernel(
        name=f"gated_delta{'_folds' * pending}{'_drafts' * drafts}",
        input_names=inputs + old * pending,
        output_names=outputs + fresh * drafts,
        source=call,
        header=include("tensor_core", "team", "operand", "gated_delta") + launch_bounds(512),
    )
