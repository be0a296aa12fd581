"""What a decoder layer is made of, as backends take it: mlx-lm's modules hold the weights, these say what they mean.

A family makes these descriptions (`models/family.py`). What a kernel needs to know of a layer is a field here.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..state import KV, Recurrent
from .adapters import ChosenAdapters, has_adapters
from .compressed import CompressedAttention
from .share import Alone, Share
from .streams import HyperConnection, StreamMixer
from .types import Window

Mask = Callable[[int | None], mx.array]  # positions that a layer sees, None for all → [B, 1, W, reach]


@dataclass(frozen=True, eq=False)
class Attention:
    """Grouped-query attention: `q_proj`, `k_proj`, `v_proj` and `o_proj` of a module, and what is between them."""

    module: nn.Module
    heads: int
    kv_heads: int
    gated: bool = False  # by head, `q_proj` gives the queries and gates of the output
    rotates: bool = True  # `rope` turns queries and keys
    window: int | None = None  # positions that a token sees; None: all before it
    causal: bool = True  # or a token also sees what follows it in its window
    query_scale: tuple[int, float] | None = None  # a period and beta: queries grow with the position
    value_scale: float | None = None
    shares: str | None = None  # layers that write no keys read those of the last one before them of this name

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> KV:
        key, value = self.head_sizes
        return KV.empty(rows, self.kv_heads, key, dtype, value, eight_bits=eight_bits)

    def looks_ahead(self, memory: KV) -> bool:
        """Return whether tokens of the running pass see some that follow them: those of an image."""
        return self.window is not None and memory.ends is not None

    @cached_property
    def head_sizes(self) -> tuple[int, int]:
        """Return the numbers of a key and of a value."""
        if not self.writes or self.values_are_keys:
            return self.module.head_dim, self.module.head_dim
        keys, values = (self.module[name].weight.shape[0] // self.kv_heads for name in ("k_proj", "v_proj"))
        return keys, values

    @property
    def writes(self) -> bool:
        """Return whether it has keys and values of its own."""
        return "k_proj" in self.module

    @property
    def values_are_keys(self) -> bool:
        """Return whether the product of `k_proj` is also the values."""
        return "v_proj" not in self.module

    @property
    def value_norm(self) -> nn.Module | None:
        return self.module.get("v_norm")

    @property
    def norms(self) -> tuple[nn.Module, nn.Module] | None:
        """Return the norms of queries and keys."""
        return (self.module["q_norm"], self.module["k_norm"]) if "k_norm" in self.module else None

    @property
    def head_gates(self) -> nn.Module | None:
        """Return what projects to one gate for every head."""
        return self.module.get("g_proj")

    @property
    def sinks(self) -> mx.array | None:
        return self.module.get("attention_sink_bias")

    @cached_property
    def plain_rope(self) -> nn.RoPE | None:
        """Return the rotation where it is RoPE's first form and nothing else changes queries, keys or values."""
        rope = self.module.get("rope") if self.rotates else None
        plain = type(rope) is nn.RoPE and not rope.traditional and rope.scale == 1
        return rope if plain and self.query_scale is None and self.value_scale is None else None


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """Multi-head latent attention: a token's keys and values are one latent vector and one rotated key.

    With a `budget` a token attends to so many at most, which the module's `indexer` selects, or did in the last layer
    that has one; with a `pool` by that many at once, and to those after the last whole pool."""

    module: nn.Module
    query_scale: float = 1.0
    latent_scale: float = 1.0
    budget: int | None = None
    pool: int | None = None  # tokens; of each the index then keeps a key and gates of its numbers

    @property
    def indexer(self) -> nn.Module | None:
        return self.module.get("indexer")

    @property
    def head_gates(self) -> nn.Module | None:
        """Return what projects to one gate for every head."""
        return self.module.get("g_proj")

    @property
    def output(self) -> nn.Module:
        """Return the last projection."""
        projection: nn.Module = self.module["dense" if "dense" in self.module else "o_proj"]
        return projection

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.module.kv_lora_rank, self.module.qk_rope_head_dim

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> KV:
        latent, rotated = self.head_sizes
        index = [] if self.indexer is None else [(self.indexer.head_dim, dtype)] * (1 if self.pool is None else 2)
        return KV.empty(rows, 1, latent, dtype, rotated, eight_bits=eight_bits, index=index)


@dataclass(frozen=True, eq=False)
class SelectedAttention:
    """Grouped-query attention to the blocks of tokens that an index selects for each query, and to what follows them.

    The index has a query of several heads and a key of one for every token; a block's key is the mean of its tokens'.
    """

    attention: Attention
    index: nn.Module  # projects to queries and the key, and has their norms
    heads: int  # of the index
    block: int  # tokens
    budget: int  # tokens that are selected
    base: float  # of the rotation of queries and keys
    axes: tuple[int, ...]  # which of a token's positions, time, row and column, each of its frequencies takes

    @property
    def module(self) -> nn.Module:
        return self.attention.module

    @property
    def size(self) -> int:
        """Return the numbers of a key of the index."""
        return int(self.index.index_qk_proj.weight.shape[0]) // (self.heads + 1)

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> KV:
        key, value = self.attention.head_sizes
        index = [(self.size, dtype), (3, mx.int32)]  # keys, and the positions at which they are rotated
        return KV.empty(rows, self.attention.kv_heads, key, dtype, value, eight_bits=eight_bits, index=index)


@dataclass(frozen=True, eq=False)
class TokenGrams:
    """Embeddings of the last few tokens, from a table on disk: each stream is given them by a gate of its own, and
    after a short convolution. Its state are the tokens before the window and the convolution's inputs."""

    module: nn.Module
    streams: int
    table: int  # which of the model's
    before: int  # tokens that an embedding depends on beside the last
    end: int  # the token that ends texts: nothing before it counts

    @property
    def dilation(self) -> int:
        return self.before + 1

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> Recurrent:
        channels, taps, _ = self.module.conv1d.weight.shape
        inputs = mx.zeros((rows, (taps - 1) * self.dilation, channels), dtype)
        return Recurrent(mx.full((rows, self.before), self.end, mx.int32), inputs)


@dataclass(frozen=True, eq=False)
class GatedDeltaNet:
    """A gated delta rule between projections."""

    module: nn.Module
    projections: tuple[nn.Module, ...]
    window: Callable[[nn.Module, list[mx.array]], Window]  # what their products [B, W, …] are

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> Recurrent:
        net = self.module
        sizes = net.num_v_heads, net.head_v_dim, net.head_k_dim, net.conv_kernel_size, net.conv_dim
        return Recurrent.empty(rows, *sizes, dtype)


@dataclass(frozen=True, eq=False)
class DeltaAttention:
    """Kimi's delta attention: a gated delta rule in which every number of a key decays by itself.

    Queries, keys and values have a projection and a convolution each, `decay` and `gate` one or two projections.
    """

    module: nn.Module
    decay: tuple[nn.Module, ...]
    gate: tuple[nn.Module, ...]
    convolutions: tuple[nn.Module, nn.Module, nn.Module]
    lower_bound: float | None = None  # of the logarithm of a decay

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> Recurrent:
        net = self.module
        channels = 3 * net.num_heads * net.head_dim
        taps = self.convolutions[0].weight.shape[1]
        return Recurrent.empty(rows, net.num_heads, net.head_dim, net.head_dim, taps, channels, dtype)


@dataclass(frozen=True, eq=False)
class Mamba2:
    module: nn.Module

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> Recurrent:
        net = self.module
        sizes = net.num_heads, net.head_dim, net.ssm_state_size, net.conv_kernel_size, net.conv_dim
        return Recurrent.empty(rows, *sizes, dtype)


@dataclass(frozen=True, eq=False)
class FeedForward:
    """An MLP, or experts and a router."""

    module: nn.Module


@dataclass(frozen=True, eq=False)
class MlpAndExperts(FeedForward):
    """Gemma 4's MLP and experts side by side, between norms. `module` is the decoder layer, whose router and experts
    are given the residual stream."""


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """What a layer adds at its end of an embedding of its own: the gates that it projects from the residual stream,
    times the embedding, projected and normed."""

    index: int  # of the layer's embedding
    gate: nn.Module
    projection: nn.Module
    norm: nn.Module


Cached = Attention | LatentAttention | SelectedAttention | CompressedAttention
Mixer = Cached | GatedDeltaNet | DeltaAttention | Mamba2 | TokenGrams


class Part(NamedTuple):
    """One of the parts of a layer. It adds to the residual stream what it makes of a norm of it."""

    norm: nn.Module  # or the `StreamMixer` of several streams
    does: Mixer | FeedForward
    beside: FeedForward | None = None  # experts that are given the same; what they make is added at the layer's end
    after: nn.Module | None = None  # a norm of what it makes
    mixer: HyperConnection | None = None  # of several streams: `norm` is then of their mean


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer."""

    module: nn.Module
    parts: tuple[Part, ...]
    following: nn.Module  # the norm after the layer: the next one's first, or the stack's last
    own_input: PerLayerInput | None = None

    @property
    def scalar(self) -> mx.array | None:
        """Return what the residual stream is multiplied by at the end."""
        return self.module.get("layer_scalar")

    @property
    def is_plain(self) -> bool:
        """Return whether the layer is its parts, each after a norm, and nothing else."""
        more = any(part.beside is not None or part.after is not None for part in self.parts) or self.streamed
        return not more and self.own_input is None and self.scalar is None

    @cached_property
    def norms(self) -> tuple[nn.Module, ...]:
        """Return the norm after each part."""
        return *(part.norm for part in self.parts[1:]), self.following

    @property
    def streamed(self) -> bool:
        return self.parts[-1].mixer is not None or isinstance(self.parts[-1].norm, StreamMixer)

    @property
    def kind(self) -> Hashable:
        """Return what two layers have in common for which kernels do the same work."""
        weights: Any = tree_flatten(self.module.parameters())
        shapes = tuple((name, tuple(array.shape), str(array.dtype)) for name, array in weights)
        numbers = [
            (
                type(part.does).__name__,
                *(n for n in vars(part.does).values() if isinstance(n, int | float | tuple | type(None))),
            )
            for part in self.parts
        ]
        adapted = any(has_adapters(each) for each in self.module.modules())
        return shapes, repr(numbers), adapted

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Return the parts that remember something of a sequence."""
        return tuple(part.does for part in self.parts if not isinstance(part.does, FeedForward))

    @cached_property
    def writers(self) -> tuple[Mixer, ...]:
        """Return those of them that have a memory of their own."""
        return tuple(each for each in self.mixers if not isinstance(each, Attention) or each.writes)


class Residual(NamedTuple):
    """The residual stream, to which a part is added, and the norm of the sum that the next part is given."""

    x: mx.array  # [B, W, H], or of several streams [B, W, S·H]
    norm: nn.Module
    after: nn.Module | None = None  # a norm of the part, before it is added
    shares: mx.array | None = None  # [B, W, S], by which each of several streams is given what the part makes


@dataclass(frozen=True)
class Pass:
    """What all layers share in one pass over a window of every sequence."""

    mask: Mask
    accepted: mx.array  # [B], how many of the pending drafts were accepted
    certain: int = 1  # tokens of the window that are committed whatever is accepted; the others become pending
    keep: int | None = None  # tokens of the window after which recurrent layers keep their state too
    last: mx.array | None = None  # [B], the only token of each sequence whose output is wanted
    adapters: ChosenAdapters | None = None  # of the sequences, if one has any
    share: Share = field(default_factory=Alone)
    own_inputs: mx.array | None = None  # [B, W, L, D], the embedding of every layer
    tokens: mx.array | None = None  # [B, W], for what depends on them beside their embeddings
    grams: tuple[mx.array, ...] = ()  # [B, W, E] of each table, for `tokens`
    selected: list[mx.array] = field(default_factory=list)  # [B, 1, W, reach], the tokens that a layer selected last
