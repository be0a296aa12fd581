"""Run layers in a row as one operation of the extension: of a small model MLX and Python take longer to describe the
parts of a layer than kernels to compute them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ...state import KV, Recurrent
from ..backend import Backend
from ..layers import Attention, FeedForward, GatedDeltaNet, LatentAttention, Layer, Mixer, Pass
from ..memories import memories_by_layer
from . import ops
from .attention import attention_arguments, latent_arguments

Memory = KV | Recurrent
Operation = tuple[str, tuple[Any, ...]]  # a function of the extension, and what it is given


class Stacked(Backend):
    """A pass over layers in as few operations as there are layers that the extension does not take, and one."""

    native: Any

    def decoder_layers(
        self, layers: Sequence[Layer], x: mx.array, normed: mx.array | None, memories: Sequence[Memory], run: Pass
    ) -> tuple[mx.array, mx.array | None]:
        plain = run.share.ranks == 1 and run.last is None and run.keep is None
        if not plain or normed is None or x.dtype not in ops.TYPES:
            return super().decoder_layers(layers, x, normed, memories, run)
        parts, stacked = list[Any](), list[Memory]()
        for layer, mine in memories_by_layer(layers, memories):
            if (operations := _operations(layer, x, iter(mine), run)) is None:
                x, normed = self._run_stack(parts, x, normed, stacked, run)
                parts, stacked = [], []
                x, normed = self.decoder_layer(layer, x, normed, mine, run)
                continue
            norms = ((norm["weight"], norm.eps) for norm in layer.norms)
            parts += [(*operation, *norm) for operation, norm in zip(operations, norms, strict=True)]
            stacked += mine
        return self._run_stack(parts, x, normed, stacked, run)

    def _run_stack(
        self, parts: list[Any], x: mx.array, normed: mx.array | None, memories: Sequence[Memory], run: Pass
    ) -> tuple[mx.array, mx.array | None]:
        """Run parts of layers whose memories these are. Return the residual stream and its norm."""
        if not parts:
            return x, normed
        made, drafts = self.native.stack(x, normed, parts), x.shape[1] - run.certain
        for memory in memories:
            made = memory.replace(made) if isinstance(memory, KV) else ops.replace_recurrent(memory, made, drafts)
        x, normed = made
        return x, normed


def _operations(layer: Layer, x: mx.array, memories: Iterator[Memory], run: Pass) -> list[Operation] | None:
    """Return the operations of a layer on a stream like x [B, W, H], None if the extension does not take it."""
    if not layer.is_plain:
        return None
    found = []
    for part in layer.parts:
        does = part.does
        made = None
        if isinstance(does, FeedForward):
            made = ops.feed_forward_arguments(does.module, x, run.adapters)
        elif (given := _mixer_arguments(does, x, next(memories), run)) is not None:
            made = _NAMES[type(does)], given
        if made is None:
            return None
        found.append(made)
    return found


_NAMES: dict[type, str] = {
    Attention: "attention_layer",
    LatentAttention: "latent_layer",
    GatedDeltaNet: "gated_delta_layer",
}


def _mixer_arguments(does: Mixer, x: mx.array, memory: Memory, run: Pass) -> tuple[Any, ...] | None:
    if isinstance(memory, Recurrent):
        if not isinstance(does, GatedDeltaNet):
            return None
        return ops.gated_delta_arguments(does.module, x, memory, run)
    if isinstance(does, LatentAttention):
        return latent_arguments(does, x, memory, run)
    return attention_arguments(does, x, memory, run) if isinstance(does, Attention) else None
