"""LongCat-Flash: layers of two attentions and two MLPs, beside which experts run; some experts return their input.

The head is like a layer of DeepSeek-V3's without experts, with an embedding of its own, as in vLLM and SGLang.
"""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import longcat_flash

from ..kernels.layers import FeedForward, LatentAttention, Part
from .family import plain_family
from .head import HeadNames, HeadSpec
from .mixers import decoder_parts


class DenseLayer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, args: longcat_flash.ModelArgs):
        super().__init__()
        self.self_attn = prepare_attention(longcat_flash.LongcatFlashMLA(args), args)
        self.mlp = longcat_flash.LongcatFlashMLP(args)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(args.hidden_size, args.rms_norm_eps) for _ in range(2)
        )


def prepare_attention(attention: nn.Module, args: longcat_flash.ModelArgs) -> nn.Module:
    """Give an attention layer the fields that our forward reads."""
    attention.num_heads, attention.q_head_dim = attention.num_attention_heads, attention.qk_head_dim
    attention.query_scale = (args.hidden_size / args.q_lora_rank) ** 0.5 if args.mla_scale_q_lora else 1.0
    attention.latent_scale = (args.hidden_size / args.kv_lora_rank) ** 0.5 if args.mla_scale_kv_lora else 1.0
    return attention


def build_longcat(config: dict[str, Any]) -> nn.Module:
    lm = longcat_flash.Model(longcat_flash.ModelArgs.from_dict(config))
    for attention in (each for layer in lm.layers for each in layer.self_attn):
        prepare_attention(attention, lm.args)
    return lm


def longcat_attention(attention: nn.Module) -> LatentAttention:
    return LatentAttention(attention, attention.query_scale, attention.latent_scale)


def longcat_parts(layer: nn.Module) -> list[Part]:
    if isinstance(layer, DenseLayer):
        return list(decoder_parts(layer, longcat_attention(layer.self_attn)))
    parts: list[Part] = []
    for first, attention, second, mlp in zip(
        layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlps, strict=True
    ):
        beside = None if parts else FeedForward(layer.mlp)
        parts += [Part(first, longcat_attention(attention)), Part(second, FeedForward(mlp), beside)]
    return parts


FAMILY = plain_family(
    "longcat_flash",
    longcat_flash,
    build=build_longcat,
    parts=longcat_parts,
    head_layer=lambda lm: DenseLayer(lm.args),
    head=HeadSpec(
        own_embedding=True,
        in_layer=True,
        modules=1,
        names=HeadNames("eh_proj", "enorm", "hnorm", "norm"),
        released_as="mtp.layers.{module}.",
    ),
    renamed=(
        (r"^mtp\.(embed_tokens|norm)\.", r"mtp.layers.0.\1."),
        (r"^(mtp\.layers\.0\.[eh]norm)\.m\.", r"\1."),
        (r"^mtp\.layers\.0\.transformer_layer\.", "mtp.layers.0."),
    ),
)
