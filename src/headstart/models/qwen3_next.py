"""Qwen3-Next: Qwen3.5's shape with the GatedDeltaNet's projections fused by key head."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next

from ..kernels.layers import GatedDeltaNet, Mixer
from ..kernels.types import Window
from .family import Family
from .mixers import gated_attention


def build_qwen3_next(config: dict[str, Any]) -> nn.Module:
    return qwen3_next.Model(qwen3_next.ModelArgs.from_dict(config))


def qwen3_next_text(lm: nn.Module) -> nn.Module:
    return lm.model


def qwen3_next_lm_head(lm: nn.Module) -> nn.Module | None:
    return None if lm.args.tie_word_embeddings else lm.lm_head


def qwen3_next_head_layer(lm: nn.Module) -> nn.Module:
    return qwen3_next.Qwen3NextDecoderLayer(lm.args, layer_idx=lm.args.full_attention_interval - 1)


def qwen3_next_window(net: nn.Module, made: list[mx.array]) -> Window:
    q, k, v, z, b, a = net.fix_query_key_value_ordering(*made)
    return Window(mx.concatenate([each.flatten(2) for each in (q, k, v)], axis=-1), z, b, a)


def qwen3_next_mixer(layer: nn.Module) -> Mixer:
    if "linear_attn" not in layer:
        return gated_attention(layer)
    net = layer.linear_attn
    return GatedDeltaNet(net, (net.in_proj_qkvz, net.in_proj_ba), qwen3_next_window)


FAMILY = Family(
    "qwen3_next",
    build_qwen3_next,
    qwen3_next_text,
    qwen3_next_lm_head,
    qwen3_next_head_layer,
    mixer=qwen3_next_mixer,
    norm_offset=1.0,
    divisible=True,
)
