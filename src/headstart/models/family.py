"""What a family of models provides, so that one loop drives them all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.nn as nn

from ..kernels.layers import Layer, Mixer, Part
from .head import QWEN_HEAD, HeadSpec
from .mixers import decoder_parts, grouped_attention, hybrid_mixer


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
    head: HeadSpec = QWEN_HEAD
    renamed: tuple[tuple[str, str], ...] = ()  # parts of tensors' names: patterns as released, and mlx-lm's
    norm_offset: float = 0.0  # what released norms leave out: 1 where they are stored as w of 1 + w
    divisible: bool = False  # `cluster` knows how to divide its trunk

    def describe(self, modules: Sequence[nn.Module], final: nn.Module) -> tuple[Layer, ...]:
        """Return the descriptions of a stack of decoder layers, after which comes the norm `final`."""
        parts = [
            tuple(self.parts(each) if self.parts is not None else decoder_parts(each, self.mixer(each)))
            for each in modules
        ]
        following = [*(each[0].norm for each in parts[1:]), final]
        return tuple(Layer(*each) for each in zip(modules, parts, following, strict=True))


def plain_family(name: str, module: ModuleType, **fields: Any) -> Family:
    """Return the family of a module of mlx-lm whose layers are attention and an MLP or experts."""
    defaults: dict[str, Any] = {
        "build": lambda config: module.Model(module.ModelArgs.from_dict(config)),
        "text": lambda lm: lm.model,
        "lm_head": lambda lm: lm.get("lm_head"),
        "mixer": grouped_attention,
    }
    return Family(name, **defaults | fields)
