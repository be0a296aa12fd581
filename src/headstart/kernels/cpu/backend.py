"""The backends of CPUs: MLX's operations as they are there, and the kernels of the extension."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...state import KV, Recurrent
from ..adapters import ChosenAdapters
from ..backend import Backend
from ..layers import Attention, FeedForward, GatedDeltaNet, LatentAttention, Layer, Part, Pass, Residual
from ..norms import is_sigmoid_gated
from ..streams import HyperConnection, Mixed, StreamMixer
from ..types import GatedDeltaWeights, Ran, Window
from . import ops
from .attention import attend_window, heads_of, native_attention, native_latent_attention
from .compiler import ensure_compiles
from .load import loaded
from .sampling import Sampled
from .stack import Stacked


def cpu_backend() -> "StockCpu":
    """Return the backend of this machine's CPU, with the extension if there is one."""
    ensure_compiles()
    found = loaded()
    return StockCpu(found.reason) if found.module is None else CpuBackend(found.module)


class StockCpu(Backend):
    """MLX's operations on a CPU, which compute every row alone."""

    asynchronous = False  # the host would see the tokens of a step only after the next one
    cut = 1
    windows = ((16, 1), (1, 5), (16, 4))  # it is slower, and has the same kernels for any number of rows

    def device(self) -> AbstractContextManager[Any]:
        return nullcontext() if mx.default_device() == mx.cpu else mx.stream(mx.cpu)

    def activations(self, stored: mx.Dtype, experts: bool, modes: set[str]) -> mx.Dtype:
        """Return float32 for what MLX multiplies in nothing else (`gather_mm` of experts), or 10 to 50 times slower
        in half precision: quantised weights."""
        return mx.float32 if experts or modes else stored


class CpuBackend(Stacked, Sampled, StockCpu):
    """The extension's kernels (see `kernels.h`). `native` is the extension."""

    def __init__(self, native: Any):
        super().__init__(f"native ({native.isa()}, {native.threads()} threads)")
        self.native = native

    def stock(self) -> Backend:
        return StockCpu()

    def with_gradients(self) -> Backend:
        from .gradients import CpuGradients

        return CpuGradients(self.native)

    def activations(self, stored: mx.Dtype, experts: bool, modes: set[str]) -> mx.Dtype:
        return stored if stored in ops.TYPES else super().activations(stored, experts, modes)

    def is_shown(self, layers: Sequence[Layer], weights: nn.Module, dtype: mx.Dtype) -> bool:
        matrices = [each for each in weights.modules() if each.get("weight") is not None and each.weight.ndim > 1]
        products = all(isinstance(each, nn.Conv1d) or ops.linear(each, dtype) is not None for each in matrices)
        return products and all(_is_native(part, dtype) for layer in layers for part in layer.parts)

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        if x.dtype not in ops.TYPES:
            return super().rms_norm(x, weight, eps)
        made: mx.array = self.native.norm(x, weight, eps)[0]
        return made

    def add_and_norm(self, x: mx.array, added: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        if x.dtype not in ops.TYPES:
            return super().add_and_norm(x, added, weight, eps)
        total, normed = self.native.norm(x, weight, eps, added)
        return total, normed

    def mix(self, x: mx.array, mixer: StreamMixer | HyperConnection) -> Mixed:
        fits = isinstance(mixer, HyperConnection) and x.dtype in ops.TYPES
        if not fits or (fn := ops.linear(mixer.fn, mx.float32)) is None:
            return super().mix(x, mixer)
        sizes = mixer.streams, mixer.iterations, mixer.norm_eps, mixer.eps
        return Mixed(*self.native.mix_streams(x, fn, mixer.scale, mixer.base, *sizes))

    def inject(self, x: mx.array, made: mx.array, shares: mx.array) -> mx.array:
        if made.dtype not in ops.TYPES:
            return super().inject(x, made, shares)
        after: mx.array = self.native.inject(x, made, shares)[0]
        return after

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        if made := ops.native_products(self.native, x, layers):
            return made
        if len(layers) == 1:
            return super().multiply(x, layers)
        return [self.multiply(x, [layer])[0] for layer in layers]

    def logits(self, hidden: mx.array, layer: nn.Module) -> mx.array:
        """Return what the sums are, in float32: in bfloat16 candidates tie that differ by an eighth."""
        if made := ops.native_products(self.native, hidden, [layer], wide=True):
            return made[0]
        return super().logits(hidden, layer)

    def products(
        self, x: mx.array, layers: Sequence[nn.Module], adapters: ChosenAdapters | None = None
    ) -> list[mx.array]:
        return ops.native_products(self.native, x, layers, adapters) or super().products(x, layers, adapters)

    def gated_product(
        self, x: mx.array, gate: nn.Module, up: nn.Module, adapters: ChosenAdapters | None = None
    ) -> mx.array:
        if made := ops.native_products(self.native, x, (gate, up), adapters, gated=True):
            return made[0]
        return super().gated_product(x, gate, up, adapters)

    def expert_products(
        self,
        x: mx.array,
        indices: mx.array,
        adapters: ChosenAdapters | None,
        adapted: bool,
        layers: Sequence[nn.Module],
    ) -> list[mx.array] | None:
        made = ops.native_products(self.native, x, layers, adapters, experts=indices, own=x.ndim > indices.ndim)
        return made or super().expert_products(x, indices, adapters, adapted, layers)

    def feed_forward(
        self, layer: FeedForward, x: mx.array, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        if (found := ops.feed_forward_arguments(layer.module, x, run.adapters)) is None:
            return super().feed_forward(layer, x, run, residual)
        operation, given = found
        return self._added(getattr(self.native, operation)(x, *given, _native(residual, run)), run, residual)

    def attention(
        self, layer: Attention, x: mx.array, memory: KV, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        made = native_attention(self.native, layer, x, memory, run, _native(residual, run))
        return self._added(made, run, residual) if made else super().attention(layer, x, memory, run, residual)

    def attend(
        self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV, run: Pass
    ) -> mx.array:
        if layer.looks_ahead(memory) or (heads := heads_of(layer, both.dtype)) is None:
            return super().attend(layer, both, keys, values, memory, run)
        return attend_window(self.native, layer, heads, both, keys, values, memory, run.last)

    def latent_attention(
        self, layer: LatentAttention, x: mx.array, memory: KV, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        made = native_latent_attention(self.native, layer, x, memory, run, _native(residual, run))
        return self._added(made, run, residual) if made else super().latent_attention(layer, x, memory, run, residual)

    def gated_delta_net(
        self, layer: GatedDeltaNet, x: mx.array, memory: Recurrent, run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        given = ops.gated_delta_arguments(layer.module, x, memory, run)
        if given is None:
            return super().gated_delta_net(layer, x, memory, run, residual)
        made = self.native.gated_delta_layer(x, *given, _native(residual, run))
        return self._added(ops.replace_recurrent(memory, made, x.shape[1] - run.certain), run, residual)

    def gated_delta_rule(self, net: nn.Module, window: Window, memory: Recurrent, run: Pass) -> Ran:
        if not ops.native_gated_delta_fits(window.qkv.dtype, memory.state.shape[-1]):
            return super().gated_delta_rule(net, window, memory, run)
        weights = GatedDeltaWeights.of(net)
        given = list(weights[:-1]), weights.eps, memory.state, memory.conv, run.accepted, memory.pending or []
        y, state, conv, *fresh = self.native.gated_delta(list(window), *given, run.certain, is_sigmoid_gated(net))
        return Ran(y, state, conv, fresh or None)

    def _added(self, made: list[mx.array], run: Pass, residual: Residual) -> tuple[mx.array, mx.array | None]:
        """Return the residual stream and its norm, which a kernel may have made already."""
        if len(made) == 1:
            return self.add(residual, made[0], run)
        total, normed = made
        return total, normed


def _is_native(part: Part, dtype: mx.Dtype) -> bool:
    """Return whether the extension computes all of a part of a layer but its products."""
    does = part.does
    if isinstance(does, Attention):
        return does.shares is None and heads_of(does, dtype) is not None
    if isinstance(does, GatedDeltaNet):
        return ops.native_gated_delta_fits(dtype, does.module.head_k_dim)
    return isinstance(does, FeedForward) and part.beside is None and ops.is_native_feed_forward(does.module)


def _native(residual: Residual, run: Pass) -> ops.NativeResidual | None:
    """Return the sum as the last stage of a kernel; None where other machines have parts of it, where the part is
    normed, and for several streams."""
    x, norm, after, shares = residual
    plain = run.share.ranks == 1 and after is None and shares is None
    return (x, norm["weight"], norm.eps) if plain else None
