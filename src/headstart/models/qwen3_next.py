"""Qwen3-Next: Qwen3.5's shape with the GatedDeltaNet's projections fused by key head."""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next

from ..kernels.products import products
from ..kernels.types import Window
from .family import Family
from .gated_delta_net import gated_delta_net


def build_qwen3_next(config: dict[str, Any]) -> nn.Module:
    return qwen3_next.Model(qwen3_next.ModelArgs.from_dict(config))


def qwen3_next_text(lm: nn.Module) -> nn.Module:
    return lm.model


def qwen3_next_lm_head(lm: nn.Module) -> nn.Module | None:
    return None if lm.args.tie_word_embeddings else lm.lm_head


def qwen3_next_head_layer(lm: nn.Module) -> nn.Module:
    return qwen3_next.Qwen3NextDecoderLayer(lm.args, layer_idx=lm.args.full_attention_interval - 1)


def qwen3_next_project(net: nn.Module, x: mx.array) -> Window:
    q, k, v, z, b, a = net.fix_query_key_value_ordering(*products(x, net.in_proj_qkvz, net.in_proj_ba))
    qkv = mx.concatenate([t.reshape(*x.shape[:2], -1) for t in (q, k, v)], axis=-1)
    return Window(qkv, z, b, a)


FAMILY = Family(
    "qwen3_next",
    build_qwen3_next,
    qwen3_next_text,
    qwen3_next_lm_head,
    qwen3_next_head_layer,
    recurrent=partial(gated_delta_net, project=qwen3_next_project),
    norm_offset=1.0,
    divisible=True,
)
