"""The parts of a layer: each adds to the residual stream what it makes of a norm of it."""

from enum import Enum
from typing import NamedTuple

import mlx.nn as nn


class PartKind(Enum):
    ATTENTION = 0
    RECURRENT = 1
    MLP = 2  # or experts


class Part(NamedTuple):
    kind: PartKind
    norm: nn.Module
    module: nn.Module
    beside: nn.Module | None = None  # experts that are given the same; what they make is added at the layer's end


def decoder_parts(layer: nn.Module) -> list[Part]:
    """Return the parts of a decoder layer: attention or a recurrent layer, then an MLP or experts."""
    if "linear_attn" in layer:
        mixer = Part(PartKind.RECURRENT, layer.input_layernorm, layer.linear_attn)
    else:
        mixer = Part(PartKind.ATTENTION, layer.input_layernorm, layer.self_attn)
    return [mixer, Part(PartKind.MLP, layer.post_attention_layernorm, layer.mlp)]
