"""The gated delta rule over a window on Metal: see `gated_delta.metal`."""

import mlx.core as mx

from ..types import GatedDeltaWeights, PendingDrafts, Ran, Window, run_gated_delta
from .device import metal_kernel, type_name


def gated_delta_shape(window: Window, state: mx.array, conv: mx.array) -> str:
    _, Hv, Dv, Dk = state.shape
    Hk = (window.qkv.shape[-1] - Hv * Dv) // (2 * Dk)
    return f"{Hk} keys of {Dk}, {Hv} values of {Dv}, {conv.shape[1] + 1} taps, {type_name(window.qkv.dtype)}"


def gated_delta_refusal(key: int, value: int) -> str | None:
    """Return why the kernel does not take heads of these sizes; None if it does."""
    fits = key % 32 == 0 and value % 8 == 0 and key <= 128 and value <= 128  # or threads have too few registers
    return None if fits else f"keys of {key} and values of {value} are not of up to 128, in multiples of 32 and 8"


def metal_gated_delta(
    window: Window,
    weights: GatedDeltaWeights,
    state: mx.array,
    conv: mx.array,
    pending: list[mx.array] | None,
    accepted: mx.array,
    certain: int,
) -> Ran:
    """Fold the `accepted` [B] first pending drafts and the window's first `certain` tokens, and run the rest."""
    folds, keeps = pending is not None, window.qkv.shape[1] > certain
    old = [f"old_{name}" for name in PendingDrafts._fields] if folds else ["conv", "state", "state", "state", "state"]
    written = [f"new_{name}" for name in PendingDrafts._fields] if keeps else ["conv_out", *["new_state"] * 4]
    source = f"""
        threadgroup float memory[headstart::TILE * (2 * DK + 2 * DV + 2)];
        threadgroup float* values = memory + headstart::TILE * 2 * DK;
        threadgroup float* decays = values + headstart::TILE * 2 * DV;
        const headstart::Tile tile = {{memory, memory + headstart::TILE * DK, values, values + headstart::TILE * DV,
                                      decays, decays + headstart::TILE}};
        const int b = int(threadgroup_position_in_grid.y), W = qkv_shape[1];
        const int certain = {"CERTAIN" if keeps else "W"};
        headstart::fold_and_run<HK, HV, DK, DV, TAPS, {str(folds).lower()}, {str(keeps).lower()}>(
            state, conv, headstart::drafts({", ".join(old)}, {"old_k_shape[1]" if folds else "0"}), qkv, z, b_gate,
            a_gate, conv_weight, A_log, dt_bias, norm_weight, {weights.eps!r}f, W,
            certain, {"accepted[b]" if folds else "0"}, y, new_state, conv_out,
            headstart::drafts({", ".join(written)}, W - certain), tile, b,
            int(threadgroup_position_in_grid.x), int(thread_index_in_threadgroup));
    """
    inputs = ["state", "conv", "qkv", "z", "b_gate", "a_gate", "conv_weight", "A_log", "dt_bias", "norm_weight"]
    arrays = [state, conv, *window, *weights[:-1]]
    if pending is not None:
        inputs += ["accepted", *old]
        arrays += [accepted, *pending]
    made = []
    if keeps:
        (B, W, C), (_, Hv, Dv, Dk) = window.qkv.shape, state.shape
        shapes = [(C,), ((C - Hv * Dv) // (2 * Dk), Dk), (Hv, Dv), (Hv,), (Hv,)]
        dtypes = [window.qkv.dtype, *[mx.float32] * 4]
        made = [((B, W - certain, *shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    outputs = ("y", "new_state", "conv_out", *(written if keeps else ()))
    kernel = metal_kernel("gated_delta", tuple(inputs), outputs, source, "gated_delta")
    return run_gated_delta(kernel, arrays, window, weights, state, conv, certain, made)
