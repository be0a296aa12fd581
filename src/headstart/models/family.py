"""What a family of models provides, so that one loop drives them all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Backend
from ..kernels.layers import Layer, Mixer, Part, PerLayerInput
from .grams import GramShape
from .head import QWEN_HEAD, HeadSpec, Weights
from .mixers import decoder_parts, grouped_attention, hybrid_mixer
from .vision import Vision


@dataclass(frozen=True)
class Family:
    """One architecture: how mlx-lm builds it, and where in it things are."""

    name: str
    build: Callable[[dict[str, Any]], nn.Module]  # config.json → mlx-lm's model
    text: Callable[[nn.Module], Any]  # that model → what has `embed_tokens`, `layers` and `norm`
    lm_head: Callable[[nn.Module], nn.Module | None]  # None where the embedding is tied
    head_layer: Callable[[nn.Module], nn.Module] | None = None  # that model → the decoder layer of a head's module
    mixer: Callable[[nn.Module], Mixer] = hybrid_mixer  # of a decoder layer: its attention or recurrent part
    parts: Callable[[nn.Module], Sequence[Part]] | None = None  # of a layer that is not a mixer and an MLP
    own_input: Callable[[nn.Module], PerLayerInput | None] = lambda layer: None  # of a layer
    # Of tokens [B, W], whose embeddings are the last argument → [B, W, L, D], an embedding for every layer.
    own_inputs: Callable[[Backend, Weights, mx.array, mx.array], mx.array | None] = lambda *given: None
    beside: tuple[str, ...] = ()  # modules beside embedding, layers and norm, where the model has them
    embedding_scale: Callable[[dict[str, Any]], float] = lambda config: 1.0  # config.json's text part → of embeddings
    logit_cap: Callable[[dict[str, Any]], float | None] = lambda config: None  # that tanh bounds logits by
    head: HeadSpec = QWEN_HEAD
    renamed: tuple[tuple[str, str], ...] = ()  # parts of tensors' names: patterns as released, and mlx-lm's
    unread: Callable[[dict[str, Any]], str] = lambda config: ""  # pattern of tensors that a release need not have
    norm_offset: float = 0.0  # what released norms leave out: 1 where they are stored as w of 1 + w
    norms_stay: bool = False  # conversions store norms as they are released
    head_parts: Callable[[nn.Module], dict[str, nn.Module]] | None = None  # that model → a head's, beside its layers
    streams: Callable[[nn.Module], int] = lambda lm: 1  # residual streams of that model
    tables: Callable[[nn.Module], tuple[GramShape, ...]] = lambda lm: ()  # of n-grams, that model's
    describes: Callable[[dict[str, Any]], bool] = lambda config: True  # or mlx-lm alone runs what has such a config
    vision: Vision | None = None  # what reads images
    divisible: bool = False  # `cluster` knows how to divide its trunk

    def describe(self, modules: Sequence[nn.Module], final: nn.Module) -> tuple[Layer, ...]:
        """Return the descriptions of a stack of decoder layers, after which comes the norm `final`."""
        parts = [
            tuple(self.parts(each) if self.parts is not None else decoder_parts(each, self.mixer(each)))
            for each in modules
        ]
        following = [*(each[0].norm for each in parts[1:]), final]
        given = zip(modules, parts, following, map(self.own_input, modules), strict=True)
        return tuple(Layer(*each) for each in given)


def plain_family(name: str, module: ModuleType, **fields: Any) -> Family:
    """Return the family of a module of mlx-lm whose layers are attention and an MLP or experts."""
    defaults: dict[str, Any] = {
        "build": lambda config: module.Model(module.ModelArgs.from_dict(config)),
        "text": lambda lm: lm.model,
        "lm_head": lambda lm: lm.get("lm_head"),
        "mixer": grouped_attention,
    }
    return Family(name, **defaults | fields)
