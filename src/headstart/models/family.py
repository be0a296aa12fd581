"""What a family of models provides, so that one loop drives them all."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import attention, gated_kv_sizes, grouped_attention, grouped_kv_sizes
from .gated_delta_net import gated_delta_net, gated_delta_sizes
from .head import QWEN_HEAD, HeadSpec
from .part import Part, decoder_parts


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
