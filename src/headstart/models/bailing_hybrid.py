"""Ling 3.0: Kimi's delta attention, and latent attention with a gate for every head. The head has the latter.

Activations of later layers are limited, as in vLLM and SGLang; transformers and mlx-lm leave the limits out, which
cost 17 points of HumanEval (omlx#2571). Ling 2.5 and 2.6, of the same `model_type` and lightning attention, are left
to mlx-lm.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import bailing_moe_v3
from mlx_lm.models.step3p5 import ClampedSwiGLU

from ..errors import CheckpointError
from ..kernels.layers import DeltaAttention, LatentAttention, Mixer, Part
from .deepseek_v3 import NEXTN, next_layer
from .family import plain_family
from .mixers import decoder_parts

KINDS = {True: "linear_attention", False: "full_attention"}
LIMITS = {"expert": "expert_swiglu_limit_list", "shared": "share_expert_swiglu_limit_list"}


def prepare_bailing(layer: nn.Module) -> nn.Module:
    """Give a decoder layer the fields that our forward reads."""
    if not layer.is_linear:
        layer.attention.q_head_dim = layer.attention.qk_head_dim
    return layer


def build_bailing(config: dict[str, Any]) -> nn.Module:
    shared = {"moe_shared_expert_intermediate_size": config["moe_intermediate_size"], "q_lora_rank": None}
    own = (
        {"head_dim": config["linear_head_dim"]} if "linear_head_dim" in config else {}
    )  # where transformers wrote it
    lm = bailing_moe_v3.Model(bailing_moe_v3.ModelArgs.from_dict(shared | config | own))
    kinds = [KINDS[layer.is_linear] for layer in lm.layers]
    if config.get("layer_types", kinds) != kinds:
        raise CheckpointError(f"config.json: layer_types is {config['layer_types']}; only {kinds} is known.")
    for number, layer in enumerate(lm.layers):
        prepare_bailing(layer)
        if "switch_mlp" in layer.mlp:
            if limit := _limit(config, "expert", number):
                layer.mlp.switch_mlp.activation = ClampedSwiGLU(limit)
            if limit := _limit(config, "shared", number):
                layer.mlp.shared_experts.limit = limit
    return lm


def _limit(config: dict[str, Any], kind: str, layer: int) -> float | None:
    limits = config.get(LIMITS[kind]) or []
    return (limits[layer] or None) if layer < len(limits) else None


def bailing_mixer(layer: nn.Module) -> Mixer:
    part = layer.attention
    if not layer.is_linear:
        return LatentAttention(part)
    convolutions = part.q_conv1d, part.k_conv1d, part.v_conv1d
    return DeltaAttention(part, (part.f_proj,), (part.g_proj,), convolutions, part.lower_bound)


def bailing_parts(layer: nn.Module) -> tuple[Part, ...]:
    return decoder_parts(layer, bailing_mixer(layer))


FAMILY = plain_family(
    "bailing_hybrid",
    bailing_moe_v3,
    build=build_bailing,
    describes=lambda config: "group_norm_size" not in config,  # which Ling 2.5's attention has
    text=lambda lm: SimpleNamespace(
        embed_tokens=lm.model.word_embeddings, layers=lm.model.layers, norm=lm.model.norm
    ),
    parts=bailing_parts,
    head_layer=lambda lm: prepare_bailing(next_layer(bailing_moe_v3.BailingDecoderLayer, lm)),
    head=replace(NEXTN, own_lm_head=False, own_embedding=False, names=replace(NEXTN.names, norm="final_layernorm")),
    renamed=(
        (r"^word_embeddings\.", "embed_tokens."),
        (r"\.shared_head\.norm\.", ".final_layernorm."),
    ),
)
