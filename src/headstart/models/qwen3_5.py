"""Qwen3.5 and Qwen3.6, dense and mixture of experts: mlx-lm keeps both in one module."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_5_moe

from ..kernels.products import products
from .base import Family
from .gated_delta_net import Projections


def build_dense(config: dict[str, Any]) -> nn.Module:
    return qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))


def build_moe(config: dict[str, Any]) -> nn.Module:
    return qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))


def text(lm: nn.Module) -> nn.Module:
    return lm.language_model.model


def lm_head(lm: nn.Module) -> nn.Module | None:
    return None if lm.language_model.args.tie_word_embeddings else lm.language_model.lm_head


def head_layer(lm: nn.Module) -> nn.Module:
    args = lm.language_model.args
    return qwen3_5.DecoderLayer(args, layer_idx=args.full_attention_interval - 1)


def project(net: nn.Module, x: mx.array) -> Projections:
    qkv, z, b, a = products(x, net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
    return Projections(qkv, z.reshape(*x.shape[:2], net.num_v_heads, net.head_v_dim), b, a)


DENSE = Family("qwen3_5", build_dense, text, lm_head, head_layer, project)
MOE = Family("qwen3_5_moe", build_moe, text, lm_head, head_layer, project)
