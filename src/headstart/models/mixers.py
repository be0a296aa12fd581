"""Descriptions of the parts of mlx-lm's decoder layers (see `kernels/layers.py`), as most families have them."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels.layers import Attention, FeedForward, GatedDeltaNet, LatentAttention, Mixer, Part
from ..kernels.types import Window


def gated_attention(layer: nn.Module) -> Attention:
    """Describe Qwen3.5's attention, whose output has a gate."""
    part = layer.self_attn
    return Attention(part, part.num_attention_heads, part.num_key_value_heads, gated=True)


def grouped_attention(layer: nn.Module, **fields: Any) -> Attention:
    """Describe grouped-query attention, with more `fields` of the description."""
    part = layer.self_attn
    return Attention(part, part.n_heads, part.n_kv_heads, **{"rotates": "rope" in part, **fields})


def latent_attention(layer: nn.Module) -> LatentAttention:
    return LatentAttention(layer.self_attn)


def gated_delta_net(net: nn.Module) -> GatedDeltaNet:
    """Describe Qwen3.5's, with a matrix for each projection."""
    return GatedDeltaNet(net, (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a), _window)


def _window(net: nn.Module, made: list[mx.array]) -> Window:
    qkv, z, b, a = made
    return Window(qkv, z.reshape(*z.shape[:2], net.num_v_heads, net.head_v_dim), b, a)


def hybrid_mixer(layer: nn.Module) -> Mixer:
    """Describe the mixer of a layer of Qwen3.5: attention, or a gated delta rule."""
    return gated_delta_net(layer.linear_attn) if "linear_attn" in layer else gated_attention(layer)


def decoder_parts(layer: nn.Module, mixer: Mixer) -> tuple[Part, ...]:
    """Return the parts of a decoder layer: a mixer, then an MLP or experts."""
    feed_forward = Part(layer.post_attention_layernorm, FeedForward(layer.mlp))
    return Part(layer.input_layernorm, mixer), feed_forward
