"""Gemma 4 (12B unified, 26B-A4B, 31B, E2B, E4B): norms before and after every part, sliding and full attention.

Full layers of the larger models use keys as values; the last layers of E2B and E4B read what earlier ones have
written, and every layer of these has an embedding of its own. 26B-A4B has experts beside the MLP. What config.json
leaves out has transformers' defaults (`checkpoint/transformers5.py`).
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4, gemma4_text

from ..errors import CheckpointError
from ..images import GemmaRules
from ..kernels import Backend
from ..kernels.layers import FeedForward, MlpAndExperts, Part, PerLayerInput
from .family import plain_family
from .gemma4_vision import make_tower
from .head import Weights
from .mixers import grouped_attention
from .vision import Vision

SLIDING = "sliding_attention"


def build_gemma4(config: dict[str, Any]) -> nn.Module:
    text = config.get("text_config", config)
    if text.get("use_bidirectional_attention") == "all":
        raise CheckpointError("config.json: use_bidirectional_attention is 'all', so this model does not generate.")
    if text["hidden_size_per_layer_input"] and text["vocab_size_per_layer_input"] < text["vocab_size"]:
        raise CheckpointError(
            "config.json: vocab_size_per_layer_input is less than vocab_size: some tokens have no row."
        )
    lm: nn.Module
    if text is config:
        lm = gemma4_text.Model(gemma4_text.ModelArgs.from_dict(text))
    else:
        lm = gemma4.Model(gemma4.ModelArgs.from_dict({**config, "vocab_size": text["vocab_size"]}))
    for number, layer in enumerate(lm.layers):
        layer.window = layer.config.sliding_window if layer.layer_type == SLIDING else None
        layer.number = number
        if layer.enable_moe:
            layer.experts.top_k = layer.config.top_k_experts
    return lm


def text_model(lm: nn.Module) -> nn.Module:
    """Return the model without what reads images and sound."""
    return lm.language_model if "language_model" in lm else lm


def unread_tensors(text: dict[str, Any]) -> str:
    """Return the pattern of what releases hold for layers that read the keys of others."""
    layers, shared = text["num_hidden_layers"], text.get("num_kv_shared_layers") or 0
    numbers = "|".join(str(layer) for layer in range(layers - shared, layers))
    return rf"^layers\.(?:{numbers})\.self_attn\.(?:[kv]_proj|[kv]_norm)\." if numbers else ""


def gemma4_parts(layer: nn.Module) -> tuple[Part, ...]:
    attention = grouped_attention(layer, window=layer.window, shares=layer.layer_type)
    forward = MlpAndExperts(layer) if layer.enable_moe else FeedForward(layer.mlp)
    return (
        Part(layer.input_layernorm, attention, after=layer.post_attention_layernorm),
        Part(layer.pre_feedforward_layernorm, forward, after=layer.post_feedforward_layernorm),
    )


def gemma4_own_input(layer: nn.Module) -> PerLayerInput | None:
    if not layer.hidden_size_per_layer_input:
        return None
    weights = layer.per_layer_input_gate, layer.per_layer_projection, layer.post_per_layer_input_norm
    return PerLayerInput(layer.number, *weights)


def gemma4_own_inputs(backend: Backend, weights: Weights, tokens: mx.array, x: mx.array) -> mx.array | None:
    """Return E2B's and E4B's embeddings [B, W, L, D] of tokens [B, W] for every layer. `x` are their scaled ones."""
    if "embed_tokens_per_layer" not in weights:
        return None
    own = backend.embed(tokens, weights.embed_tokens_per_layer, x.dtype)
    own = own.reshape(*tokens.shape, len(weights.layers), -1)
    made = backend.product(x, weights.per_layer_model_projection) * x.shape[-1] ** -0.5
    made = backend.norm(made.reshape(own.shape), weights.per_layer_projection_norm)
    return (made + own * own.shape[-1] ** 0.5) * 2**-0.5


FAMILY = plain_family(
    "gemma4",
    gemma4_text,
    build=build_gemma4,
    text=lambda lm: text_model(lm).model,
    lm_head=lambda lm: text_model(lm).get("lm_head"),
    unread=unread_tensors,
    parts=gemma4_parts,
    own_input=gemma4_own_input,
    own_inputs=gemma4_own_inputs,
    beside=("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
    embedding_scale=lambda config: float(config["hidden_size"] ** 0.5),
    logit_cap=lambda config: config.get("final_logit_softcapping"),
    vision=Vision(make_tower, GemmaRules),
)
