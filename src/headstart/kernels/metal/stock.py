"""MLX's operations as they are on Apple GPUs: what kernels are compared with, and what computes where none fits."""

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel

from ..backend import Backend


class StockMetal(Backend):
    def delta_recurrence(
        self, tokens: list[mx.array], state: mx.array, mask: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Run the recurrence in mlx-lm's kernel."""
        if state.shape[-1] % 32:
            return super().delta_recurrence(tokens, state, mask)
        q, k, v, g, beta = tokens
        return gated_delta_kernel(q, k, v, g, beta, state, mask)
