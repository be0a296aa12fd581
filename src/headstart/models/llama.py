"""Llama and Mistral: no head. Mistral 3 has a vision tower around a Llama or a Ministral 3."""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, ministral3, mistral3

from ..errors import CheckpointError
from ..kernels.types import ArrangedHeads
from .attention import grouped_attention, rotate_heads
from .family import plain_family

TEXT_TYPES = ("llama", "mistral", "ministral3")


def build_mistral3(config: dict[str, Any]) -> nn.Module:
    kind = config["text_config"].get("model_type", "mistral")
    if kind not in TEXT_TYPES:
        raise CheckpointError(f"config.json: text_config.model_type {kind!r} is none of {', '.join(TEXT_TYPES)}.")
    return mistral3.Model(mistral3.ModelArgs.from_dict(config))


def scale_queries(layer: nn.Module, heads: ArrangedHeads, offset: mx.array) -> ArrangedHeads:
    """Rotate, and in Ministral 3 scale queries that are far from the start by the logarithm of their position."""
    queries, keys, values = rotate_heads(layer, heads, offset)
    if isinstance(layer, ministral3.Attention):
        period, beta = float(layer.original_max_position_embeddings), float(layer.scaling_beta)
        positions = offset[:, None] + mx.arange(queries.shape[2])  # [B, W]
        scale = 1 + beta * mx.log(1 + mx.floor(positions / period))
        queries = queries * scale[:, None, :, None].astype(queries.dtype)
    return ArrangedHeads(queries, keys, values)


def llama_window(layer: nn.Module) -> int | None:
    return layer.args.sliding_window if layer.use_sliding else None


LLAMA = plain_family("llama", llama, window=llama_window)
MINISTRAL3 = plain_family(
    "ministral3", ministral3, attention=partial(grouped_attention, arrange=scale_queries), window=llama_window
)
MISTRAL3 = plain_family(
    "mistral3",
    mistral3,
    build=build_mistral3,
    text=lambda lm: lm.language_model.model,
    lm_head=lambda lm: lm.language_model.get("lm_head"),
    attention=MINISTRAL3.attention,
    window=llama_window,
)
