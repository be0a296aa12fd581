"""The backend of NVIDIA cards: a decoder layer in one launch, and kernels for what does not fit that."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from math import prod

import mlx.core as mx
import mlx.nn as nn

from ...state import KV, Recurrent
from ..adapters import ChosenAdapters, has_adapters
from ..backend import Backend
from ..layers import Attention, GatedDeltaNet, Layer, Mamba2, Pass
from ..norms import is_sigmoid_gated
from ..products import add_biases
from ..streams import HyperConnection, StreamWeights
from ..types import ArrangedHeads, GatedDeltaWeights, HeadNorms, Ran, Window, at_last
from ..weights import matrix_weights
from .attention import (
    WIDEST,
    arrange_fits,
    attention_fits,
    launch_arrange,
    launch_arrange_into,
    launch_attention,
)
from .compiler import compiled_together
from .decoder_layer import decoder_layer
from .experts import launch_combine, launch_experts, launch_route
from .gated_delta import gated_delta_fits, launch_gated_delta
from .head import embed_fits, launch_draft_input, launch_embed
from .norm import launch_norm, norm_fits
from .products import MOST_ROWS, SumOrder, launch_products, product_refusal
from .sampling import describe_sampling
from .steps import CudaSteps
from .streams import launch_stream_weights

HALVES = (mx.bfloat16, mx.float16)


@cache
def cuda_backend() -> "CudaBackend":
    """Return the backend of the card: one, since its models share what persistent kernels need."""
    return CudaBackend()


class CudaBackend(CudaSteps):
    """The kernels beside this file."""

    most_rows = MOST_ROWS

    def is_exact(self, layers: Sequence[Layer], weights: nn.Module, dtype: mx.Dtype) -> bool:
        """Return whether attention is ours: MLX's changes its kernel with the length of a text."""
        mixers = [mixer for layer in layers for mixer in layer.mixers]
        attentions = [each for each in mixers if not isinstance(each, GatedDeltaNet | Mamba2)]
        return all(isinstance(each, Attention) and attention_fits(each) for each in attentions) and dtype in HALVES

    def stock(self) -> Backend:
        return Backend()

    def with_gradients(self) -> Backend:
        from .gradients import CudaGradients

        return CudaGradients()

    def reader(self, layers: Sequence[Layer], dtype: mx.Dtype) -> Backend:
        from .prompts import CudaPrompts, reads_prompts  # derived from this class

        return CudaPrompts(self.description) if reads_prompts(layers, dtype) else self

    def compiling(self, dtype: mx.Dtype) -> AbstractContextManager[None]:
        return compiled_together(dtype)

    def compile_sampling(self, logits: mx.array) -> None:
        describe_sampling(logits)

    # Products

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        fits = norm_fits(x, weight)
        return launch_norm(False, eps, [x, weight])[0] if fits else super().rms_norm(x, weight, eps)

    def add_and_norm(self, x: mx.array, added: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        if not norm_fits(x, weight):
            return super().add_and_norm(x, added, weight, eps)
        total, normed = launch_norm(True, eps, [x, added, weight])
        return total, normed

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        if not _multiplies(prod(x.shape[:-1]), x.dtype, *layers):
            return super().multiply(x, layers)
        found = [matrix_weights(layer) for layer in layers]
        alike = len({SumOrder.of(weights) for weights in found}) == 1
        made = launch_products(x, found) if alike else [launch_products(x, [weights])[0] for weights in found]
        return add_biases(made, layers)

    def gated_product(
        self, x: mx.array, gate: nn.Module, up: nn.Module, adapters: ChosenAdapters | None = None
    ) -> mx.array:
        if not _gates(prod(x.shape[:-1]), x.dtype, gate, up):
            return super().gated_product(x, gate, up, adapters)
        return launch_products(x, [matrix_weights(gate), matrix_weights(up)], gated=True)[0]

    def hyper_weights(self, products: mx.array, hc: HyperConnection) -> StreamWeights:
        return launch_stream_weights(products, hc)

    def multiply_experts(self, x: mx.array, indices: mx.array, layers: Sequence[nn.Module]) -> list[mx.array] | None:
        if not _multiplies(prod(indices.shape[:-1]), x.dtype, *layers):
            return None
        found = [matrix_weights(layer) for layer in layers]
        alike = len({SumOrder.of(weights) for weights in found}) == 1
        if alike:
            return launch_experts(x, indices, found)
        return [launch_experts(x, indices, [weights])[0] for weights in found]

    def gated_experts(
        self,
        x: mx.array,
        indices: mx.array,
        adapters: ChosenAdapters | None,
        adapted: bool,
        gate: nn.Module,
        up: nn.Module,
    ) -> mx.array | None:
        if not _gates(prod(indices.shape[:-1]), x.dtype, gate, up):
            return super().gated_experts(x, indices, adapters, adapted, gate, up)
        return launch_experts(x, indices, [matrix_weights(gate), matrix_weights(up)], gated=True)[0]

    def route(self, logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
        fits = logits.dtype in HALVES and logits.shape[-1] <= 1024 and top <= 32
        return launch_route(logits, top, normed) if fits else super().route(logits, top, normed)

    def combine(self, parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
        fits = parts.dtype in HALVES
        return launch_combine(parts, scores, shared, gate) if fits else super().combine(parts, scores, shared, gate)

    # Layers

    def decoder_layer(
        self, layer: Layer, x: mx.array, normed: mx.array | None, memories: Sequence[KV | Recurrent], run: Pass
    ) -> tuple[mx.array, mx.array | None]:
        if len(layer.parts) == 2 and layer.is_plain and len(memories) == 1 and run.share.ranks == 1:
            whole = decoder_layer(self.persistent, layer, x, memories[0], run)
            if whole is not None:
                return at_last(whole, run.last), None
        return super().decoder_layer(layer, x, normed, memories, run)

    def write(self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV) -> ArrangedHeads:
        plain = not layer.gated and memory.start is None
        if not plain or not self._arranges(layer, memory) or not self._attends(layer, both, memory):
            return super().write(layer, both, keys, values, memory)
        # In place. A pass in the same launch that does not wait for it would draft worse, no more.
        given = both, keys, values, _norms(layer), _rope(layer), memory.offset
        made = launch_arrange_into(*given, (memory.keys, memory.values))
        _, memory.keys, memory.values = made
        return made

    def arrange(
        self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV
    ) -> ArrangedHeads:
        if not self._arranges(layer, memory):
            return super().arrange(layer, both, keys, values, memory)
        start = memory.offset if memory.start is None else memory.start
        return launch_arrange(both, keys, values, _norms(layer), _rope(layer), start, gated=layer.gated)

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        if not self._attends(layer, both, memory):
            return super().attend_heads(layer, heads, both, memory, run)
        out = launch_attention(
            heads.queries,
            both if layer.gated else None,
            memory.keys,
            memory.values,
            memory.offset,
            layer.module.scale,
            memory.reach,
            layer.causal,
            layer.window,
        )
        return at_last(out, run.last)

    def _arranges(self, layer: Attention, memory: KV) -> bool:
        return memory.positions is None and arrange_fits(layer)

    def _attends(self, layer: Attention, both: mx.array, memory: KV) -> bool:
        narrow = both.shape[1] <= WIDEST and not layer.looks_ahead(memory)
        return narrow and memory.keys.dtype in HALVES and attention_fits(layer)

    def gated_delta_rule(self, net: nn.Module, window: Window, memory: Recurrent, run: Pass) -> Ran:
        weights, state, conv = GatedDeltaWeights.of(net), memory.state, memory.conv
        if is_sigmoid_gated(net) or not gated_delta_fits(state, window.qkv.dtype, weights.conv.shape[1]):
            return super().gated_delta_rule(net, window, memory, run)
        return launch_gated_delta(window, weights, state, conv, memory.pending, run.accepted, run.certain)

    def embed_and_norm(
        self, tokens: mx.array, embedding: nn.Module, norm: nn.Module, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array]:
        fits = embed_fits(tokens, dtype, embedding, norm)
        return (
            launch_embed(tokens, embedding, norm, dtype)
            if fits
            else super().embed_and_norm(tokens, embedding, norm, dtype)
        )

    def pair(
        self,
        tokens: mx.array,
        hidden: mx.array,
        embedding: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        embedding_first: bool,
    ) -> mx.array:
        if not embed_fits(tokens, hidden.dtype, embedding, *norms):
            return super().pair(tokens, hidden, embedding, norms, embedding_first)
        return launch_draft_input(tokens, hidden, embedding, *norms, embedding_first)


def _norms(layer: Attention) -> HeadNorms:
    assert layer.norms is not None
    queries, keys = layer.norms
    return HeadNorms(queries.weight, keys.weight, queries.eps)


def _rope(layer: Attention) -> nn.RoPE:
    assert layer.plain_rope is not None
    return layer.plain_rope


def _multiplies(rows: int, dtype: mx.Dtype, *layers: nn.Module) -> bool:
    """Return whether our product takes all of these."""
    return rows <= MOST_ROWS and not any(product_refusal(dtype, matrix_weights(layer)) for layer in layers)


def _gates(rows: int, dtype: mx.Dtype, gate: nn.Module, up: nn.Module) -> bool:
    """Return whether our product takes a gate and its `up` at once."""
    if has_adapters(gate, up) or "bias" in gate or "bias" in up or not _multiplies(rows, dtype, gate, up):
        return False
    return SumOrder.of(matrix_weights(gate)) == SumOrder.of(matrix_weights(up))
