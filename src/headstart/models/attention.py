"""A gated attention layer over mlx-lm's weights, and over keys and values of rows of different lengths."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..kernels import cpu
from ..kernels.attention import gated_attention
from ..kernels.products import product, products
from ..state import KV
from .residual import Residual


def attention(
    layer: nn.Module,
    x: mx.array,
    mask: Callable[[], mx.array],
    memory: KV,
    residual: Residual,
    last: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Add the layer's output for x [B, W, H] to the residual → the sum and its norm. `mask` makes [B, 1, W, reach],
    which says the same as `memory.offset`: a token sees all up to itself. With `last` [B] only that token of each row
    is computed, [B, 1, H]; the others are only remembered."""
    if (native := cpu.native()) is not None:
        made = cpu.native_attention(native, layer, x, memory, last, residual.native)
        if made is not None:
            return residual.added(made)
    both, keys, values = products(x, layer.q_proj, layer.k_proj, layer.v_proj)  # `both`: queries and gates, by head
    out = gated_attention(layer, both, keys, values, memory, mask, last)
    return residual.add(product(out, layer.o_proj))
