"""A GatedDeltaNet layer over mlx-lm's weights, with the drafts of a window pending (see `state/recurrent.py`)."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ..kernels import cpu
from ..kernels.gated_delta import fold_and_run
from ..kernels.products import product
from ..kernels.types import Ran, Window
from ..state import Recurrent
from .residual import Residual


def gated_delta_net(
    net: nn.Module,
    x: mx.array,
    memory: Recurrent,
    accepted: mx.array,
    certain: int,
    residual: Residual,
    *,
    project: Callable[[nn.Module, mx.array], Window],
) -> tuple[mx.array, mx.array]:
    """Fold what is certain into `memory`, run the rest of the window from there, and add the layer's output for x
    [B, W, H] to the residual → the sum and its norm.

    Certain are the `accepted` [B] first of the pending drafts and the window's first `certain` tokens. Both halves
    are one recurrence, so the state is bit for bit what token-by-token decoding would have made.
    """
    if (native := cpu.native()) is not None:
        made = cpu.native_gated_delta(native, net, x, memory, accepted, certain, residual.native)
        if made is not None:
            out, drafts = made
            memory.pending = drafts or None
            return residual.added(out)
    y = run_window(net, project(net, x), memory, accepted, certain)
    return residual.add(product(y.reshape(*y.shape[:2], -1), net.out_proj))


def run_window(
    net: nn.Module,
    window: Window,
    memory: Recurrent,
    accepted: mx.array,
    certain: int,
    run: Callable[..., Ran] = fold_and_run,
) -> mx.array:
    """Run a projected window and keep in `memory` what it leaves → [B, W, Hv, Dv]."""
    y, memory.state, memory.conv, memory.pending = run(net, window, memory, accepted, certain)
    return y


def gated_delta_sizes(net: nn.Module) -> tuple[int, int, int, int, int]:
    return net.num_v_heads, net.head_v_dim, net.head_k_dim, net.conv_kernel_size, net.conv_dim
