"""What a decoder layer is made of, as backends take it: mlx-lm's modules hold the weights, these say what they mean.

A family makes these descriptions (`models/family.py`), and they are made once for a model. A backend computes from
them, so what a kernel needs to know of a layer is a field here, and no question to the family.
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
from .share import Alone, Share
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

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> KV:
        key, value = self.head_sizes
        return KV.empty(rows, self.kv_heads, key, dtype, value, eight_bits=eight_bits)

    @cached_property
    def head_sizes(self) -> tuple[int, int]:
        """Return the numbers of a key and of a value."""
        keys, values = (self.module[name].weight.shape[0] // self.kv_heads for name in ("k_proj", "v_proj"))
        return keys, values

    @property
    def norms(self) -> tuple[nn.Module, nn.Module] | None:
        """Return the norms of queries and keys."""
        return (self.module["q_norm"], self.module["k_norm"]) if "q_norm" in self.module else None

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
    """Multi-head latent attention: a token's keys and values are one latent vector and one rotated key."""

    module: nn.Module
    query_scale: float = 1.0
    latent_scale: float = 1.0

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.module.kv_lora_rank, self.module.qk_rope_head_dim

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> KV:
        latent, rotated = self.head_sizes
        return KV.empty(rows, 1, latent, dtype, rotated, eight_bits=eight_bits)


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


Mixer = Attention | LatentAttention | GatedDeltaNet | Mamba2


class Part(NamedTuple):
    """One of the parts of a layer. It adds to the residual stream what it makes of a norm of it."""

    norm: nn.Module
    does: Mixer | FeedForward
    beside: FeedForward | None = None  # experts that are given the same; what they make is added at the layer's end


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer."""

    module: nn.Module
    parts: tuple[Part, ...]
    following: nn.Module  # the norm after the layer: the next one's first, or the stack's last

    @cached_property
    def norms(self) -> tuple[nn.Module, ...]:
        """Return the norm after each part."""
        return *(part.norm for part in self.parts[1:]), self.following

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


class Residual(NamedTuple):
    """The residual stream, to which a part is added, and the norm of the sum that the next part is given."""

    x: mx.array  # [B, W, H]
    norm: nn.Module


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


def at_last(x: mx.array, last: mx.array | None, axis: int = 1) -> mx.array:
    """Return x at index `last` [B] of each row along an axis, which stays with a length of one; all of x for None."""
    return x if last is None else mx.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), axis=axis)
