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
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..state import CHUNK, KV, Recurrent
from .checks import KernelCheck
from .compressed import CompressedAttention
from .compressed_attention import CompressedAttentions
from .drafts import Drafting
from .layers import (
    Attention,
    DeltaAttention,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    Mamba2,
    MlpAndExperts,
    Part,
    Pass,
    Residual,
    SelectedAttention,
    TokenGrams,
)
from .memories import memories_by_layer
from .report import Report, join_columns
from .streams import HyperConnection, StreamMixer
from .types import at_last

Remembered = Callable[..., Any]  # of a BatchState, the width of the window, and the inputs of a pass


class Backend(CompressedAttentions, Drafting):
    """Operations on plain arrays, and on the weights that mlx-lm's modules hold.

    Attributes:
        asynchronous: The host describes a step while the device computes the one before.
        cut: A prompt has the same bits wherever it is cut at multiples of this. 1: anywhere, and as decoding would
            give it. None: only where it is always cut alike.
        chunk: Tokens between the places where a prompt's state may be kept, if no turn begins in between.
        widest: Most tokens of a pass over a prompt.
        scored: Most tokens of a pass whose attention scores are an array.
        keeps: A pass over a prompt may go past places where its state is kept: see `Pass.keep`.
        layers_ahead: Layers of such a pass that are launched at once; as many may run already. None: all, since
            a layer under way holds little memory.
        pass_overhead: Tokens of a prompt that take as long as what every pass over one does besides.
        most_rows: Positions of a step, of all sequences, that are computed independently of each other.
        windows: Widths and numbers of sequences that show whether rows are independent: kernels mostly switch below
            sixteen rows.
    """

    asynchronous = True
    cut: int | None = None
    chunk = CHUNK
    widest = CHUNK
    scored = CHUNK
    keeps = False
    layers_ahead: int | None = None
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

    def around(self) -> "Backend":
        """Return the backend beside layers that are not ours: it samples, and knows nothing of how they round."""
        other = copy(self.stock())
        other.cut, other.keeps, other.layers_ahead = None, False, None
        return other

    def with_gradients(self) -> "Backend":
        """Return the backend of operations that have gradients, to train with."""
        return self.stock()

    # Loading a model

    def activations(self, stored: mx.Dtype, experts: bool, modes: set[str]) -> mx.Dtype:
        """Return the type of activations of a model that is `stored` in a type, with `experts` or not, and quantised
        in these modes."""
        return stored

    def prepare(
        self, weights: nn.Module, dtype: mx.Dtype, layers: Sequence[Layer] = (), *, images: bool = False
    ) -> None:
        """Do once what computing with these weights in activations of `dtype` needs. `layers`: those of the model,
        if it is a trunk or drafts for one; `images`: it sees some."""

    def pass_bytes(self, layers: Sequence[Layer], dtype: mx.Dtype) -> int:
        """Return the memory that the widest pass over a prompt needs while it runs, where that is much."""
        return 0

    def copies_held(self, layers: Sequence[Layer], dtype: mx.Dtype, *, eight_bits: bool) -> tuple[int, int]:
        """Return how many copies of a sequence's recurrent states and KV caches are in memory while steps run."""
        return 1, 1

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
        for layer, held in memories_by_layer(layers, memories):
            x, normed = self.decoder_layer(layer, x, normed, held, run)
        return x, normed

    def decoder_layer(
        self, layer: Layer, x: mx.array, normed: mx.array | None, memories: Sequence[KV | Recurrent], run: Pass
    ) -> tuple[mx.array, mx.array | None]:
        """Run a layer over the residual stream x [B, W, H] and its norm, and return both after it.

        A norm that is None is not known yet. Of the layer's `memories` each remembers the window.
        """
        if layer.streamed:
            return self.streamed_layer(layer, x, memories, run), None
        normed = self.norm(x, layer.parts[0].norm) if normed is None else normed
        late, held = None, iter(memories)
        for part, norm in zip(layer.parts, layer.norms, strict=True):
            assert normed is not None
            if part.beside is not None:
                late = self.mlp_or_mixture(part.beside.module, normed, run.adapters)
            x, normed = self.run_part(part, normed, held, run, Residual(x, norm, part.after))
        if late is not None:
            x, normed = self.add(Residual(x, layer.following), late, run)
        if layer.own_input is not None:
            x = self.add_own_input(layer.own_input, x, run)
        if layer.scalar is not None:
            x = x * layer.scalar
        changed = layer.own_input is not None or layer.scalar is not None
        return x, self.norm(x, layer.following) if changed else normed

    def streamed_layer(self, layer: Layer, x: mx.array, memories: Sequence[KV | Recurrent], run: Pass) -> mx.array:
        """Run a layer over several residual streams x [B, W, S·H], and return them after it."""
        held = iter(memories)
        for part in layer.parts:
            if isinstance(part.does, TokenGrams):
                memory = next(held)
                assert isinstance(memory, Recurrent)
                x = self.token_grams(part.does, x, part.norm(x), memory, run)
                continue
            mixer = part.mixer or part.norm
            assert isinstance(mixer, StreamMixer | HyperConnection)
            mean, streams, shares = self.mix(x, mixer)
            given = mean if part.mixer is None else self.norm(mean, part.norm)
            x, _ = self.run_part(part, given, held, run, Residual(streams, part.norm, shares=shares))
        return x

    def run_part(
        self, part: Part, x: mx.array, held: Iterator[KV | Recurrent], run: Pass, residual: Residual
    ) -> tuple[mx.array, mx.array | None]:
        """Add what a part makes of x [B, W, H] to the residual stream → the sum and its norm. A part that remembers
        something of a sequence takes the next of the memories that are `held`."""
        does = part.does
        if isinstance(does, MlpAndExperts):
            return self.mlp_and_experts(does, x, run, residual)
        if isinstance(does, FeedForward):
            return self.feed_forward(does, x, run, residual)
        memory = next(held)
        if isinstance(memory, Recurrent):
            if isinstance(does, GatedDeltaNet):
                return self.gated_delta_net(does, x, memory, run, residual)
            if isinstance(does, DeltaAttention):
                return self.delta_attention(does, x, memory, run, residual)
            assert isinstance(does, Mamba2)
            return self.mamba2(does, x, memory, run, residual)
        shares = None if residual.shares is None else at_last(residual.shares, run.last)
        residual = residual._replace(x=at_last(residual.x, run.last), shares=shares)
        if isinstance(does, CompressedAttention):
            more = [next(held) for _ in range(does.memories - 1)]
            return self.compressed_attention(does, x, [memory, *more], run, residual)
        if isinstance(does, SelectedAttention):
            return self.selected_attention(does, x, memory, run, residual)
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

    def recover(self) -> None:
        """Forget what a pass that failed has left to the next."""

    def device(self) -> AbstractContextManager[Any]:
        """Return the context in which a pass runs on this backend's device."""
        return nullcontext()
