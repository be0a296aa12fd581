"""The operations of a step, and what a device computes better.

`Backend` is the reference: the bodies of its methods are MLX's own operations. They are the oracle of the tests, what
runs without a compiler, and what a new family or format gets for free. `cpu/`, `cuda/` and `metal/` have a subclass
each, which overrides what the device does better, at whatever granularity suits it, and falls back by `super()`.

A backend is chosen once, when a model is loaded (`choose_backend`), and held by the model. Nothing outside this
package names a device.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..state import CHUNK, KV, BatchState, Recurrent
from .checks import KernelCheck
from .drafts import Drafting
from .layers import (
    Attention,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    Mamba2,
    Part,
    Pass,
    Residual,
    at_last,
)
from .recurrent import Recurrents
from .report import Report, join_columns

Remembered = Callable[..., Any]  # of a BatchState, the width of the window, and the inputs of a pass


class Backend(Recurrents, Drafting):
    """Operations on plain arrays, and on the weights that mlx-lm's modules hold.

    Attributes:
        asynchronous: The host describes a step while the device computes the one before.
        cut: A prompt has the same bits wherever it is cut at multiples of this. 1: anywhere, and as decoding would
            give it. None: only where it is always cut alike.
        widest: Most tokens of a pass over a prompt.
        keeps: A pass over a prompt may go past places where its state is kept: see `Pass.keep`.
        pass_overhead: Tokens of a prompt that take as long as what every pass over one does besides.
        most_rows: Positions of a step, of all sequences, that are computed independently of each other.
        windows: Widths and numbers of sequences that show whether rows are independent: kernels mostly switch below
            sixteen rows.
    """

    asynchronous = True
    cut: int | None = None
    widest = CHUNK
    keeps = False
    pass_overhead = 4
    most_rows = sys.maxsize
    windows: tuple[tuple[int, int], ...] = ((16, 1), (1, 5), (2, 16), (9, 16))

    def __init__(self, description: str | None = None):
        """Take which kernels compute: native and for which device, or stock and why."""
        self.description = description or "stock"

    def __str__(self) -> str:
        return self.description

    def stock(self) -> "Backend":
        """Return the backend of MLX's own operations on this device."""
        return self

    def with_gradients(self) -> "Backend":
        """Return the backend of operations that have gradients, to train with."""
        return self.stock()

    # Loading a model

    def activations(self, stored: mx.Dtype, experts: bool, modes: set[str]) -> mx.Dtype:
        """Return the type of activations of a model that is `stored` in a type, with `experts` or not, and quantised
        in these modes."""
        return stored

    def prepare(self, weights: nn.Module, dtype: mx.Dtype, layers: Sequence[Layer] = ()) -> None:
        """Do once what computing with these weights in activations of `dtype` needs. `layers`: those of the model,
        if it is a trunk or drafts for one."""

    def reader(self, layers: Sequence[Layer], dtype: mx.Dtype) -> "Backend":
        """Return the backend that reads prompts for these layers."""
        return self

    def is_exact(self, layers: Sequence[Layer], weights: nn.Module, dtype: mx.Dtype) -> bool:
        """Return whether rows are independent as far as one can know without computing: the rest is measured."""
        return True

    def is_shown(self, layers: Sequence[Layer], weights: nn.Module, dtype: mx.Dtype) -> bool:
        """Return whether kernels of ours compute every operation of these layers, whose rows tests have shown to be
        independent: then nothing need be measured."""
        return False

    def checks(self) -> list[KernelCheck]:
        """Return what preparing found out about kernels."""
        return []

    def compiling(self, dtype: mx.Dtype) -> AbstractContextManager[None]:
        """Return a context in which passes are described for the first time, to have kernels compiled together."""
        return nullcontext()

    def compile_sampling(self, logits: mx.array) -> None:
        """Have kernels compiled that sample from logits [B, W, V] of this type."""

    # A pass

    def embed(self, tokens: mx.array, embedding: nn.Module, dtype: mx.Dtype) -> mx.array:
        """Return the embedding of tokens [B, W] in `dtype`. MLX's of nvfp4, mxfp4 and mxfp8 is bfloat16, which holds
        it exactly; float16 does not hold what its scales make."""
        if embedding.get("scales") is not None and embedding.scales.dtype == mx.float16 != dtype:
            weight, scales, biases = (embedding[name][tokens] for name in ("weight", "scales", "biases"))
            wide = scales.astype(dtype), biases.astype(dtype)
            return mx.dequantize(weight, *wide, group_size=embedding.group_size, bits=embedding.bits)
        made: mx.array = embedding(tokens)
        return made.astype(dtype)

    def embed_and_norm(
        self, tokens: mx.array, embedding: nn.Module, norm: nn.Module, dtype: mx.Dtype
    ) -> tuple[mx.array, mx.array]:
        """Return the embedding of tokens [B, W] in `dtype`, and its norm."""
        x = self.embed(tokens, embedding, dtype)
        return x, self.norm(x, norm)

    def pair(
        self,
        tokens: mx.array,
        hidden: mx.array,
        embedding: nn.Module,
        norms: tuple[nn.Module, nn.Module],
        embedding_first: bool,
    ) -> mx.array:
        """Return the input [B, W, 2H] of a head's first product for pairs of tokens [B, W] and hidden states
        [B, W, H]: the norms of the tokens' embedding and of the hidden states, or in reverse."""
        return self.join_pair(self.embed(tokens, embedding, hidden.dtype), hidden, norms, embedding_first)

    def join_pair(
        self, embedding: mx.array, hidden: mx.array, norms: tuple[nn.Module, nn.Module], embedding_first: bool
    ) -> mx.array:
        pair = [self.norm(x, norm) for x, norm in zip((embedding, hidden), norms, strict=True)]
        return mx.concatenate(pair if embedding_first else pair[::-1], axis=-1)

    def decoder_layers(
        self,
        layers: Sequence[Layer],
        x: mx.array,
        normed: mx.array | None,
        memories: Sequence[KV | Recurrent],
        run: Pass,
    ) -> tuple[mx.array, mx.array | None]:
        """Run layers one after the other."""
        held = iter(memories)
        for layer in layers:
            x, normed = self.decoder_layer(layer, x, normed, [next(held) for _ in layer.mixers], run)
        return x, normed

    def decoder_layer(
        self, layer: Layer, x: mx.array, normed: mx.array | None, memories: Sequence[KV | Recurrent], run: Pass
    ) -> tuple[mx.array, mx.array | None]:
        """Run a layer over the residual stream x [B, W, H] and its norm, and return both after it.

        A norm that is None is not known yet. Of the layer's `memories` each remembers the window.
        """
        normed = self.norm(x, layer.parts[0].norm) if normed is None else normed
        late, held = None, iter(memories)
        for part, norm in zip(layer.parts, layer.norms, strict=True):
            if part.beside is not None:
                late = self.mlp_or_mixture(part.beside.module, normed, run.adapters)
            x, normed = self.run_part(part, normed, held, run, Residual(x, norm))
        return (x, normed) if late is None else self.add(Residual(x, layer.following), late, run)

    def run_part(
        self, part: Part, x: mx.array, held: Iterator[KV | Recurrent], run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array]:
        """Add what a part makes of x [B, W, H] to the residual stream → the sum and its norm. A part that remembers
        something of a sequence takes the next of the memories that are `held`."""
        does = part.does
        if isinstance(does, FeedForward):
            return self.feed_forward(does, x, run, residual)
        memory = next(held)
        if isinstance(memory, Recurrent):
            if isinstance(does, GatedDeltaNet):
                return self.gated_delta_net(does, x, memory, run, residual)
            assert isinstance(does, Mamba2)
            return self.mamba2(does, x, memory, run, residual)
        residual = residual._replace(x=at_last(residual.x, run.last))
        if isinstance(does, LatentAttention):
            return self.latent_attention(does, x, memory, run, residual)
        assert isinstance(does, Attention)
        return self.attention(does, x, memory, run, residual)

    def remember(self, run: Callable[..., Any]) -> Remembered:
        """Return `run(state, *inputs)` as a function of (state, width, *inputs) that may remember its description.

        The pass may change what `state` holds but not its lengths, and returns arrays. `width` is that of its window.
        """
        return lambda state, width, *inputs: run(state, *inputs)

    # A step

    def window(self, last: mx.array, drafts: mx.array) -> mx.array:
        """Return the window [B, k+1] of the last tokens [B] and drafts [B, k]."""
        return join_columns([last[:, None], drafts]) if drafts.shape[1] else last[:, None]

    def report(self, columns: Sequence[mx.array]) -> Report:
        """Return integers [B, ...] of a step side by side, for the host."""
        return Report(columns)

    def release(self) -> None:
        """Let another thread run what only one thread at a time may, once all that this one launched is computed."""

    def device(self) -> AbstractContextManager[Any]:
        """Return the context in which a pass runs on this backend's device."""
        return nullcontext()


def state_of(layers: Sequence[Layer], rows: int, dtype: mx.Dtype, eight_bit_kv: bool) -> BatchState:
    """Return what these layers hold of `rows` sequences before their first token."""
    memories = [mixer.state(rows, dtype, eight_bit_kv) for layer in layers for mixer in layer.mixers]
    return BatchState.empty(memories, rows)
