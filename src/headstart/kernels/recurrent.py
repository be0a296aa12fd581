"""Recurrent layers, with the drafts of a window pending (see `state/recurrent.py`), by MLX's own operations."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g, gated_delta_ops, normalize_qk
from mlx_lm.models.ssm import compute_dt

from ..state import BatchState, Recurrent
from .attention import Attentions
from .layers import (
    DeltaAttention,
    GatedDeltaNet,
    Layer,
    Mamba2,
    Pass,
    Residual,
    TokenGrams,
)
from .memories import memories_by_layer
from .streams import split_streams
from .types import PendingDrafts, Ran, Window

Recurrence = Callable[[list[mx.array], mx.array, mx.array | None], tuple[mx.array, mx.array]]


def fold_and_run(
    recurrence: Recurrence, tokens: list[mx.array], qkv: mx.array, memory: Recurrent, run: Pass
) -> tuple[mx.array, mx.array, list[mx.array] | None]:
    """Fold what is certain into the state that `memory` holds, and run the rest of the window from there.

    Certain are the `accepted` [B] first of the pending drafts and the window's first `certain` tokens. Both halves
    are one recurrence, so the state is bit for bit what token-by-token decoding would have made.

    Args:
        recurrence: Runs `tokens` from a state → outputs [B, T, …] and the state after. One whose mask [B, T] is false
            leaves the state as it is; its output is undefined.
        tokens: q, k, v, and two more, [B, W, …] each.
        qkv: The convolution's input [B, W, C].

    Returns:
        Outputs, the state after everything certain, and the drafts in doubt.
    """
    fold, mask, certain = [a[:, : run.certain] for a in tokens], None, run.certain
    if memory.pending is not None:  # what a pending draft puts out is not used, so its key stands in for its query
        old = PendingDrafts(*memory.pending)
        before = [old.k, old.k, old.v, old.g, old.beta]
        fold = [mx.concatenate([then, now], axis=1) for then, now in zip(before, fold, strict=True)]
        width = old.qkv.shape[1]
        index = mx.arange(width + certain)
        mask = (index < run.accepted[:, None]) | (index >= width)
    y, state = recurrence(fold, memory.state, mask)
    y = y[:, -certain:]
    if qkv.shape[1] == certain:
        return y, state, None
    drafts = [a[:, certain:] for a in tokens]
    y = mx.concatenate([y, recurrence(drafts, state, None)[0]], axis=1)
    return y, state, [qkv[:, certain:], *drafts[1:]]


def conv_history(memory: Recurrent, accepted: mx.array) -> mx.array:
    """Return the convolution's inputs [B, taps - 1, C] before the new window, after `accepted` [B] drafts."""
    return memory.conv if memory.pending is None else last_inputs(memory.conv, memory.pending[0], accepted)


def last_inputs(held: mx.array, drafts: mx.array, accepted: mx.array) -> mx.array:
    """Return the last inputs [B, T, C], of those that are held [B, T, C] and the `accepted` [B] first drafts."""
    last = accepted[:, None] + mx.arange(held.shape[1])  # [B, T]
    return mx.take_along_axis(mx.concatenate([held, drafts], axis=1), last[..., None], axis=1)


def token_history(memory: Recurrent, accepted: mx.array) -> mx.array:
    """Return the tokens [B, T] before the new window that `TokenGrams` depend on, after `accepted` [B] drafts."""
    if memory.pending is None:
        return memory.state
    tokens = mx.concatenate([memory.state, memory.pending[1]], axis=1)
    return mx.take_along_axis(tokens, accepted[:, None] + mx.arange(memory.state.shape[1]), axis=1)


def gram_history(layers: Sequence[Layer], state: BatchState) -> mx.array:
    """Return the tokens [B, T] before the new window of a model that has `TokenGrams`, all of which hold the same."""
    each = (
        (mixer, memory)
        for layer, held in memories_by_layer(layers, state.layers)
        for mixer, memory in zip(layer.mixers, held, strict=True)
    )
    memory = next(memory for mixer, memory in each if isinstance(mixer, TokenGrams))
    assert isinstance(memory, Recurrent)
    return token_history(memory, state.accepted)


class Recurrents(Attentions):
    """Recurrent layers. A layer is given x [B, W, H] and returns the residual stream with its output, and the norm of
    that; `memory` then holds what the window leaves."""

    def gated_delta_net(
        self, layer: GatedDeltaNet, x: mx.array, memory: Recurrent, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        net = layer.module
        window = layer.window(net, self.products(x, layer.projections, run.adapters))
        y = self.remember_window(net, window, memory, run)
        return self.add(residual, self.product(y.reshape(*y.shape[:2], -1), net.out_proj, run.adapters), run)

    def remember_window(self, net: nn.Module, window: Window, memory: Recurrent, run: Pass) -> mx.array:
        """Run the gated delta rule → [B, W, Hv, Dv]; `memory` then holds what the window leaves."""
        if run.keep is not None:  # in a prompt, all of which is certain
            first, second = (Window(*[a[:, at] for a in window]) for at in (slice(run.keep), slice(run.keep, None)))
            before = self.remember_window(net, first, memory, replace(run, certain=run.keep, keep=None))
            memory.kept = memory.state, memory.conv
            rest = replace(run, certain=run.certain - run.keep, keep=None)
            return mx.concatenate([before, self.remember_window(net, second, memory, rest)], axis=1)
        y, memory.state, memory.conv, memory.pending = self.gated_delta_rule(net, window, memory, run)
        return y

    def gated_delta_rule(self, net: nn.Module, window: Window, memory: Recurrent, run: Pass) -> Ran:
        """Run the gated delta rule with everything between a layer's projections; `memory` does not change."""
        qkv, z, b, a = window
        B, W, _ = qkv.shape
        inputs = mx.concatenate([conv_history(memory, run.accepted), qkv], axis=1)
        q, k, v = mx.split(nn.silu(net.conv1d(inputs)), [net.key_dim, 2 * net.key_dim], axis=-1)
        q, k = (each.reshape(B, W, net.num_k_heads, net.head_k_dim) for each in (q, k))
        v = v.reshape(B, W, net.num_v_heads, net.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=net.head_k_dim**-0.5, eps=1e-6)
        tokens = [q, k, v, compute_g(net.A_log, a, net.dt_bias), mx.sigmoid(b)]
        y, state, drafts = fold_and_run(self.delta_recurrence, tokens, qkv, memory, run)
        conv = inputs[:, run.certain : run.certain + memory.conv.shape[1]]
        return Ran(net.norm(y, z), state, conv, drafts)

    def delta_attention(
        self, layer: DeltaAttention, x: mx.array, memory: Recurrent, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Run Kimi's delta attention. In `PendingDrafts`, `g` has a decay for every number of a key."""
        net, (B, W, _) = layer.module, x.shape
        first = (net.q_proj, net.k_proj, net.v_proj, layer.decay[0], net.b_proj, layer.gate[0])
        *qkv, a, b, z = self.products(x, first, run.adapters)
        for each in layer.decay[1:]:
            a = self.product(a, each, run.adapters)
        for each in layer.gate[1:]:
            z = self.product(z, each, run.adapters)
        y = self.remember_delta(layer, Window(mx.concatenate(qkv, axis=-1), z, b, a), memory, run)
        gates = mx.sigmoid(z.astype(mx.float32)).astype(y.dtype).reshape(y.shape)
        out = (self.norm(y, net.o_norm) * gates).reshape(B, W, -1)
        return self.add(residual, self.product(out, net.o_proj, run.adapters), run)

    def remember_delta(self, layer: DeltaAttention, window: Window, memory: Recurrent, run: Pass) -> mx.array:
        """Run the rule of a layer of delta attention → [B, W, H, D]; `memory` then holds what the window leaves."""
        net, (B, W, _) = layer.module, window.qkv.shape
        inputs = mx.concatenate([conv_history(memory, run.accepted), window.qkv], axis=1)
        parts = zip(mx.split(inputs, 3, axis=-1), layer.convolutions, strict=True)
        q, k, v = (nn.silu(conv(each)).reshape(B, W, net.num_heads, net.head_dim) for each, conv in parts)
        q, k = normalize_qk(q, k, inv_scale=net.head_dim**-0.5, eps=1e-6)
        a, bias = (each.reshape(*each.shape[:-1], net.num_heads, -1) for each in (window.a, net.dt_bias))
        rate = net.A_log.reshape(net.num_heads, 1)
        bound = layer.lower_bound
        g = compute_g(rate, a, bias) if bound is None else compute_lower_bound_g(rate, a, bias, bound)
        tokens = [q, k, v, g, mx.sigmoid(window.b.astype(mx.float32))]
        y, memory.state, memory.pending = fold_and_run(self.delta_recurrence, tokens, window.qkv, memory, run)
        memory.conv = inputs[:, run.certain : run.certain + memory.conv.shape[1]]
        return y.astype(window.qkv.dtype)

    def delta_recurrence(
        self, tokens: list[mx.array], state: mx.array, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Run q, k, v, g, beta of T tokens from `state` [B, Hv, Dv, Dk] → outputs [B, T, Hv, Dv], the state after."""
        q, k, v, g, beta = tokens
        return gated_delta_ops(q, k, v, g, beta, state, mask)

    def token_grams(self, layer: TokenGrams, x: mx.array, normed: mx.array, memory: Recurrent, run: Pass) -> mx.array:
        """Return the streams x [B, W, S·H], whose norm is known, with what the tables have of the window's tokens."""
        part, taps = layer.module, layer.module.conv1d.weight.shape[1]
        certain, dilation, width = run.certain, layer.dilation, x.shape[1]
        assert run.tokens is not None
        found = run.grams[layer.table].astype(x.dtype)
        keys, values = self.products(found, (part.key_proj, part.value_proj), run.adapters)
        keys, queries = (split_streams(a, layer.streams) for a in (part.norm_key(keys), normed))  # [B, W, S, H]
        gate = (keys * queries).sum(axis=-1, keepdims=True) * keys.shape[-1] ** -0.5
        gate = mx.sqrt(mx.maximum(mx.abs(gate), 1e-6)) * mx.sign(gate)
        gated = (mx.sigmoid(gate) * values.astype(mx.float32)[..., None, :]).flatten(-2)
        fresh = part.norm_conv(gated).astype(x.dtype)

        inputs = mx.concatenate([conv_history(memory, run.accepted), fresh], axis=1)
        tokens = mx.concatenate([token_history(memory, run.accepted), run.tokens], axis=1)
        memory.pending = None if width == certain else [fresh[:, certain:], run.tokens[:, certain:]]

        def at(count: int) -> tuple[mx.array, mx.array]:
            return tokens[:, count : count + layer.before], inputs[:, count : count + memory.conv.shape[1]]

        memory.kept = None if run.keep is None else at(run.keep)
        memory.state, memory.conv = at(certain)
        weight, made = part.conv1d.weight[..., 0].astype(mx.float32), mx.zeros(())  # [C, taps]
        for tap in range(taps):
            made = made + weight[:, tap] * inputs[:, tap * dilation : tap * dilation + width].astype(mx.float32)
        return (x.astype(mx.float32) + gated + nn.silu(made)).astype(x.dtype)

    def mamba2(
        self, layer: Mamba2, x: mx.array, memory: Recurrent, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Run a Mamba-2 layer. In `PendingDrafts`, `k` and `v` are what papers call B and x, `g` is the decay and
        `beta` the step size.

        mlx-lm multiplies the tokens of a prompt together and rounds otherwise than in decoding. A window must give
        the bits of plain decoding, so every token is one step of the recurrence.
        """
        net, (B, W, _) = layer.module, x.shape
        inner, shared = net.intermediate_size, net.n_groups * net.ssm_state_size
        projected = self.product(x, net.in_proj, run.adapters)
        z, qkv, dt = mx.split(projected, [inner, inner + net.conv_dim], axis=-1)
        inputs = mx.concatenate([conv_history(memory, run.accepted), qkv], axis=1)
        v, k, q = mx.split(nn.silu(net.conv1d(inputs)), [inner, inner + shared], axis=-1)
        v = v.reshape(B, W, net.num_heads, net.head_dim)
        k, q = (a.reshape(B, W, net.n_groups, net.ssm_state_size) for a in (k, q))
        dt = compute_dt(dt, net.dt_bias, net.time_step_limit)  # [B, W, H]
        tokens = [q, k, v, mx.exp(-mx.exp(net.A_log) * dt), dt]
        y, memory.state, memory.pending = fold_and_run(_state_space, tokens, qkv, memory, run)
        memory.conv = inputs[:, run.certain : run.certain + memory.conv.shape[1]]
        y = y.astype(x.dtype) + v * net.D.astype(x.dtype)[:, None]  # [B, W, H, D]
        return self.add(residual, self.product(net.norm(y.reshape(B, W, -1), z), net.out_proj, run.adapters), run)


def _state_space(tokens: list[mx.array], state: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
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
