"""Single operations of a backend, called as a layer calls them."""

import mlx.core as mx
import mlx.nn as nn

from headstart.kernels import Backend
from headstart.kernels.layers import Pass, Residual
from headstart.kernels.norms import Norm
from headstart.kernels.types import Window
from headstart.state import Recurrent


def no_mask(window: int | None) -> mx.array:
    raise AssertionError("this operation needs no mask")


def nothing(x: mx.array) -> Residual:
    """A residual that leaves what is added to it as it is."""
    return Residual(mx.zeros_like(x), Norm(x.shape[-1], 1e-6))


def run_window(
    backend: Backend, net: nn.Module, window: Window, memory: Recurrent, accepted: mx.array, certain: int
) -> mx.array:
    """The outputs of a gated delta rule [B, W, Hv, Dv]; `memory` then holds what the window leaves."""
    run = Pass(no_mask, accepted, certain)
    y, memory.state, memory.conv, memory.pending = backend.gated_delta_rule(net, window, memory, run)
    return y
