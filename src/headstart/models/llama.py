"""Llama and Mistral: released without a head; `train-head` makes one.

Mistral 3 has a vision tower around a Llama or a Ministral 3.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import llama, ministral3, mistral3

from ..errors import CheckpointError
from ..kernels.layers import Attention
from .family import plain_family
from .windows import build_with_windows, trained_head_layer, windowed, windowed_attention

TEXT_TYPES = ("llama", "mistral", "ministral3")


def build_mistral3(config: dict[str, Any]) -> nn.Module:
    text = config["text_config"]
    kind = text.get("model_type", "mistral")
    if kind not in TEXT_TYPES:
        raise CheckpointError(f"config.json: text_config.model_type {kind!r} is none of {', '.join(TEXT_TYPES)}.")

    def make(text: dict[str, Any]) -> nn.Module:
        return mistral3.Model(mistral3.ModelArgs.from_dict({**config, "text_config": text}))

    return build_with_windows(make, text)


def llama_attention(layer: nn.Module) -> Attention:
    """Describe a layer's attention. Ministral 3 scales queries that are far from the start by the logarithm of their
    position."""
    part = layer.self_attn
    scale = None
    if isinstance(part, ministral3.Attention):
        scale = (part.original_max_position_embeddings, part.scaling_beta)
    return windowed_attention(layer, query_scale=scale)


LLAMA_LAYERS: dict[str, Any] = {"mixer": llama_attention, "head_layer": trained_head_layer}
LLAMA = plain_family("llama", llama, build=windowed(llama), **LLAMA_LAYERS)
MINISTRAL3 = plain_family("ministral3", ministral3, build=windowed(ministral3), **LLAMA_LAYERS)
MISTRAL3 = plain_family(
    "mistral3",
    mistral3,
    build=build_mistral3,
    text=lambda lm: lm.language_model.model,
    lm_head=lambda lm: lm.language_model.get("lm_head"),
    **LLAMA_LAYERS,
)
