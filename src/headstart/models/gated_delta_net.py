"""GatedDeltaNet over mlx-lm's weights, with the drafts of a window kept in doubt (see `state/recurrent.py`)."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from ..kernels.gated_delta import Drafts, Inputs, Weights, Window, fold_and_run, fuses, recurrence
from ..kernels.products import product
from ..state import Pending, Recurrent

Projections = Window  # families differ in how the weights of a layer's projections are fused


def gated_delta_net(
    net: nn.Module, projected: Projections, memory: Recurrent, accepted: mx.array, certain: int
) -> mx.array:
    """Fold what is certain into `memory`, run the rest of the window from there → [B, W, H].

    Certain are the `accepted` [B] first of the pending drafts and the window's first `certain` tokens. Both halves
    are one recurrence, so the state is bit for bit what token-by-token decoding would have made.
    """
    run = fused if fuses(memory.state, projected.qkv.dtype) else stock
    y = run(net, projected, memory, accepted, certain)
    return product(y.reshape(*y.shape[:2], -1), net.out_proj)


def fused(net: nn.Module, projected: Projections, memory: Recurrent, accepted: mx.array, certain: int) -> mx.array:
    """In one kernel → [B, W, Hv, Dv]."""
    weights = Weights(net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight, net.norm.eps)
    pending = Drafts(*memory.pending.arrays()) if memory.pending is not None else None
    y, memory.state, memory.conv, drafts = fold_and_run(
        projected, weights, memory.state, memory.conv, pending, accepted, certain
    )
    memory.pending = Pending(*drafts) if drafts is not None else None
    return y


def stock(net: nn.Module, projected: Projections, memory: Recurrent, accepted: mx.array, certain: int) -> mx.array:
    """In stock ops, with the recurrence in mlx-lm's kernel where it has one → [B, W, Hv, Dv]."""
    qkv, z, b, a = projected
    B, W, _ = qkv.shape
    inputs = mx.concatenate([memory.conv_history(accepted), qkv], axis=1)
    mixed = nn.silu(net.conv1d(inputs))
    q, k, v = mx.split(mixed, [net.key_dim, 2 * net.key_dim], axis=-1)
    q = q.reshape(B, W, net.num_k_heads, net.head_k_dim)
    k = k.reshape(B, W, net.num_k_heads, net.head_k_dim)
    v = v.reshape(B, W, net.num_v_heads, net.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=net.head_k_dim**-0.5, eps=1e-6)
    g, beta = compute_g(net.A_log, a, net.dt_bias), mx.sigmoid(b)

    window = Inputs(q, k, v, g, beta)
    fold, mask = Inputs(*[t[:, :certain] for t in window]), None
    if (old := memory.pending) is not None:
        # Nobody reads what a pending draft puts out, so its key stands in for its query.
        before = Inputs(old.k, old.k, old.v, old.g, old.beta)
        fold = Inputs(*[mx.concatenate([then, now], axis=1) for then, now in zip(before, fold, strict=True)])
        index = mx.arange(old.width + certain)
        mask = (index < accepted[:, None]) | (index >= old.width)
    y, memory.state = recurrence(fold, memory.state, mask)
    y = y[:, -certain:]
    memory.conv = inputs[:, certain : certain + memory.conv.shape[1]]
    memory.pending = None
    if W > certain:
        drafts = Inputs(*[t[:, certain:] for t in window])
        memory.pending = Pending(qkv[:, certain:], drafts.k, drafts.v, drafts.g, drafts.beta)
        ran, _ = recurrence(drafts, memory.state)
        y = mx.concatenate([y, ran], axis=1)
    return net.norm(y, z)
