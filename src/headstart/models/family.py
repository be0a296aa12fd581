"""What a family of models provides, so that one loop drives them all."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..state import KV, BatchState, Recurrent
from .attention import attention, gated_kv_sizes, grouped_attention, grouped_kv_sizes
from .gated_delta_net import gated_delta_net, gated_delta_sizes
from .head import QWEN_HEAD, HeadSpec
from .part import Part, PartKind, decoder_parts


@dataclass(frozen=True)
class Family:
    """One architecture: how mlx-lm builds it, and where in it things are."""

    name: str
    build: Callable[[dict[str, Any]], nn.Module]  # config.json → mlx-lm's model
    text: Callable[[nn.Module], Any]  # that model → what has `embed_tokens`, `layers` and `norm`
    lm_head: Callable[[nn.Module], nn.Module | None]  # None where the embedding is tied
    head_layer: Callable[[nn.Module], nn.Module] | None = None  # that model → the decoder layer of a head's module
    parts: Callable[[nn.Module], list[Part]] = decoder_parts  # of a layer
    recurrent: Callable[..., tuple[mx.array, mx.array]] = gated_delta_net  # a recurrent layer
    state_sizes: Callable[[nn.Module], tuple[int, int, int, int, int]] = gated_delta_sizes  # see `Recurrent.empty`
    head: HeadSpec = QWEN_HEAD
    attention: Callable[..., tuple[mx.array, mx.array]] = attention  # see `attention.py`
    kv_sizes: Callable[[nn.Module], tuple[int, int, int]] = gated_kv_sizes  # heads, sizes of a key and of a value
    window: Callable[[nn.Module], int | None] = lambda layer: None  # positions that a decoder layer sees; None: all
    renamed: tuple[tuple[str, str], ...] = ()  # parts of tensors' names: patterns as released, and mlx-lm's
    norm_offset: float = 0.0  # what released norms leave out: 1 where they are stored as w of 1 + w
    divisible: bool = False  # `cluster` knows how to divide its trunk


def plain_family(name: str, module: ModuleType, **fields: Any) -> Family:
    """Return the family of a module of mlx-lm whose layers are attention and an MLP or experts."""
    defaults: dict[str, Any] = {
        "build": lambda config: module.Model(module.ModelArgs.from_dict(config)),
        "text": lambda lm: lm.model,
        "lm_head": lambda lm: lm.get("lm_head"),
        "attention": grouped_attention,
        "kv_sizes": grouped_kv_sizes,
    }
    return Family(name, **defaults | fields)


def empty_state(
    family: Family, layers: list[nn.Module], rows: int, dtype: mx.Dtype, eight_bit_kv: bool
) -> BatchState:
    """Return what these layers hold of `rows` sequences before their first token."""
    memories: list[KV | Recurrent] = []
    for layer, part in ((each, part) for each in layers for part in family.parts(each)):
        if part.kind is PartKind.ATTENTION:
            heads, key, value = family.kv_sizes(part.module)
            window = family.window(layer)
            memories.append(KV.empty(rows, heads, key, dtype, value, eight_bits=eight_bit_kv, window=window))
        elif part.kind is PartKind.RECURRENT:
            memories.append(Recurrent.empty(rows, *family.state_sizes(part.module), dtype))
    return BatchState.empty(memories, rows)
