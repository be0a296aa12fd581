"""The gated delta rule with everything between a layer's projections: cpu, cuda, metal or stock ops."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, gated_delta_kernel, gated_delta_ops, normalize_qk

from . import cpu, metal
from .cuda.gated_delta import gated_delta_fits, launch_gated_delta
from .metal.gated_delta import gated_delta_shape, metal_gated_delta
from .types import Drafts, GatedDeltaWeights, Ran, Window


def fold_and_run(net: nn.Module, window: Window, memory: Any, accepted: mx.array, certain: int) -> Ran:
    """Fold what is certain into the state that `memory` holds, and run the rest of the window from there.

    Certain are the `accepted` [B] first of the pending drafts and the window's first `certain` tokens. `memory` has
    `state`, `conv` and `pending` (see `state/recurrent.py`) and is not changed.
    """
    state, conv, dtype = memory.state, memory.conv, window.qkv.dtype
    weights = GatedDeltaWeights(net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight, net.norm.eps)
    if (native := cpu.native()) is not None and cpu.native_gated_delta_fits(dtype, state):
        y, state, conv, *fresh = native.gated_delta(
            list(window), list(weights[:-1]), weights.eps, state, conv, accepted, memory.pending or [], certain
        )
        return Ran(y, state, conv, fresh or None)
    if gated_delta_fits(state, dtype, weights.conv.shape[1]):
        return launch_gated_delta(window, weights, state, conv, memory.pending, accepted, certain)
    if metal.on_metal() and metal.chosen_kernel("gated delta", gated_delta_shape(window, state, conv)) == "metal":
        return metal_gated_delta(window, weights, state, conv, memory.pending, accepted, certain)
    return stock_fold_and_run(net, window, memory, accepted, certain)


def stock_fold_and_run(net: nn.Module, window: Window, memory: Any, accepted: mx.array, certain: int) -> Ran:
    """Do the same in stock ops, the recurrence in mlx-lm's kernel where it has one. It rounds more often."""
    qkv, z, b, a = window
    B, W, _ = qkv.shape
    inputs = mx.concatenate([conv_history(memory, accepted), qkv], axis=1)
    mixed = nn.silu(net.conv1d(inputs))
    q, k, v = mx.split(mixed, [net.key_dim, 2 * net.key_dim], axis=-1)
    q = q.reshape(B, W, net.num_k_heads, net.head_k_dim)
    k = k.reshape(B, W, net.num_k_heads, net.head_k_dim)
    v = v.reshape(B, W, net.num_v_heads, net.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=net.head_k_dim**-0.5, eps=1e-6)
    g, beta = compute_g(net.A_log, a, net.dt_bias), mx.sigmoid(b)

    tokens = [q, k, v, g, beta]
    fold, mask = [t[:, :certain] for t in tokens], None
    if memory.pending is not None:
        old = Drafts(*memory.pending)
        # What a pending draft puts out is not used, so its key stands in for its query.
        before = [old.k, old.k, old.v, old.g, old.beta]
        fold = [mx.concatenate([then, now], axis=1) for then, now in zip(before, fold, strict=True)]
        index = mx.arange(old.k.shape[1] + certain)
        mask = (index < accepted[:, None]) | (index >= old.k.shape[1])
    y, state = _recurrence(fold, memory.state, mask)
    y = y[:, -certain:]
    conv = inputs[:, certain : certain + memory.conv.shape[1]]
    if W == certain:
        return Ran(net.norm(y, z), state, conv, None)
    drafts = [t[:, certain:] for t in tokens]
    ran, _ = _recurrence(drafts, state, None)
    return Ran(net.norm(mx.concatenate([y, ran], axis=1), z), state, conv, [qkv[:, certain:], *drafts[1:]])


def conv_history(memory: Any, accepted: mx.array) -> mx.array:
    """Return the convolution's inputs [B, taps - 1, C] before the new window, after `accepted` [B] drafts."""
    if memory.pending is None:
        return memory.conv
    inputs = mx.concatenate([memory.conv, Drafts(*memory.pending).qkv], axis=1)
    last = accepted[:, None] + mx.arange(memory.conv.shape[1])  # [B, taps - 1]
    return mx.take_along_axis(inputs, last[..., None], axis=1)


def _recurrence(tokens: list[mx.array], state: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """Run q, k, v, g, beta of T tokens from `state` [B, Hv, Dv, Dk] → outputs [B, T, Hv, Dv] and the state after.

    A token whose `mask` [B, T] is false leaves the state as it is; its output is undefined.
    """
    run = gated_delta_kernel if metal.on_metal() and state.shape[-1] % 32 == 0 else gated_delta_ops
    q, k, v, g, beta = tokens
    return run(q, k, v, g, beta, state, mask)
