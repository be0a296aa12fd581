"""The gated delta rule: mlx-lm's Metal kernels on Apple silicon, its stock ops everywhere else."""

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops


def recurrence(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Run T tokens from `state`. A token whose `mask` [B, T] is false leaves the state as it is, and its output
    is undefined.

    q, k: [B, T, Hk, Dk]; v: [B, T, Hv, Dv]; g, beta: [B, T, Hv]; state: [B, Hv, Dv, Dk] → y [B, T, Hv, Dv], state
    """
    metal = mx.metal.is_available() and mx.default_device() == mx.gpu and k.shape[-1] % 32 == 0
    run = gated_delta_kernel if metal else gated_delta_ops
    return run(q, k, v, g, beta, state, mask)  # type: ignore[no-any-return]
