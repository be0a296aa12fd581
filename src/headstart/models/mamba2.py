"""A Mamba-2 layer over mlx-lm's weights, with the drafts of a window pending (see `state/recurrent.py`).

mlx-lm multiplies the tokens of a prompt together and rounds otherwise than in decoding. A window must give the bits
of plain decoding, so every token is one step of the recurrence.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ssm import compute_dt

from ..kernels.gated_delta import conv_history
from ..kernels.products import product
from ..kernels.types import Drafts
from ..state import Recurrent
from .residual import Residual


def mamba2(
    net: nn.Module, x: mx.array, memory: Recurrent, accepted: mx.array, certain: int, residual: Residual
) -> tuple[mx.array, mx.array]:
    """Fold what is certain into `memory` and run the rest of the window from there, as `gated_delta_net` does.

    In `Drafts`, `k` and `v` are what papers call B and x, `g` is the decay and `beta` the step size.
    """
    B, W, _ = x.shape
    inner, shared = net.intermediate_size, net.n_groups * net.ssm_state_size
    z, qkv, dt = mx.split(product(x, net.in_proj), [inner, inner + net.conv_dim], axis=-1)
    inputs = mx.concatenate([conv_history(memory, accepted), qkv], axis=1)
    v, k, q = mx.split(nn.silu(net.conv1d(inputs)), [inner, inner + shared], axis=-1)
    v = v.reshape(B, W, net.num_heads, net.head_dim)
    k, q = (a.reshape(B, W, net.n_groups, net.ssm_state_size) for a in (k, q))
    dt = compute_dt(dt, net.dt_bias, net.time_step_limit)  # [B, W, H]
    tokens = [q, k, v, mx.exp(-mx.exp(net.A_log) * dt), dt]

    fold, mask = [a[:, :certain] for a in tokens], None
    if memory.pending is not None:  # what a pending draft puts out is not used, so its key stands in for its query
        old = Drafts(*memory.pending)
        before = [old.k, old.k, old.v, old.g, old.beta]
        fold = [mx.concatenate([then, now], axis=1) for then, now in zip(before, fold, strict=True)]
        width = old.qkv.shape[1]
        index = mx.arange(width + certain)
        mask = (index < accepted[:, None]) | (index >= width)
    y, memory.state = _recurrence(fold, memory.state, mask)
    y = y[:, -certain:]
    memory.conv = inputs[:, certain : certain + memory.conv.shape[1]]
    memory.pending = None
    if W > certain:
        drafts = [a[:, certain:] for a in tokens]
        y = mx.concatenate([y, _recurrence(drafts, memory.state, None)[0]], axis=1)
        memory.pending = [qkv[:, certain:], *drafts[1:]]
    y = y.astype(x.dtype) + v * net.D.astype(x.dtype)[:, None]  # [B, W, H, D]
    return residual.add(product(net.norm(y.reshape(B, W, -1), z), net.out_proj))


def mamba2_sizes(net: nn.Module) -> tuple[int, int, int, int, int]:
    return net.num_heads, net.head_dim, net.ssm_state_size, net.conv_kernel_size, net.conv_dim


def _recurrence(tokens: list[mx.array], state: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """Run q, k, v, decay and step size of T tokens from `state` [B, H, D, N] → outputs [B, T, H, D], the state after.

    A token whose `mask` [B, T] is false leaves the state as it is; its output is undefined.
    """
    q, k, v, decay, dt = tokens
    repeats = state.shape[1] // k.shape[2]
    q, k = (mx.repeat(a, repeats, axis=2)[..., None, :] for a in (q, k))  # [B, T, H, 1, N]
    v = (dt[..., None] * v)[..., None]  # [B, T, H, D, 1]
    outputs = []
    for t in range(v.shape[1]):
        after = decay[:, t, :, None, None] * state + v[:, t] * k[:, t]
        state = after if mask is None else mx.where(mask[:, t, None, None, None], after, state)
        outputs.append((state * q[:, t]).sum(axis=-1))
    return mx.stack(outputs, axis=1), state
