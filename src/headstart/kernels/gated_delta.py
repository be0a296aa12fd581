"""The gated delta rule: mlx-lm's Metal kernels on Apple silicon, its stock ops everywhere else."""

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops


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
