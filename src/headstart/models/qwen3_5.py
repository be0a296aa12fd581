"""Qwen3.5, Qwen3.6 and Qwen3.8, dense and mixture of experts: mlx-lm keeps both in one module."""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import qwen3_5, qwen3_5_moe

from ..images import QwenRules
from .family import Family
from .qwen3_5_vision import QwenTower
from .vision import Vision


def build_qwen3_5(config: dict[str, Any]) -> nn.Module:
    return qwen3_5.Model(qwen3_5.ModelArgs.from_dict(config))


def build_qwen3_5_moe(config: dict[str, Any]) -> nn.Module:
    return qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))


def qwen3_5_text(lm: nn.Module) -> nn.Module:
    return lm.language_model.model


def qwen3_5_lm_head(lm: nn.Module) -> nn.Module | None:
    return None if lm.language_model.args.tie_word_embeddings else lm.language_model.lm_head


def qwen3_5_head_layer(lm: nn.Module) -> nn.Module:
    args = lm.language_model.args
    return qwen3_5.DecoderLayer(args, layer_idx=args.full_attention_interval - 1)


QWEN3_5: dict[str, Any] = {
    "text": qwen3_5_text,
    "lm_head": qwen3_5_lm_head,
    "head_layer": qwen3_5_head_layer,
    "norm_offset": 1.0,
    "vision": Vision(QwenTower, QwenRules),
    "divisible": True,
}
DENSE = Family("qwen3_5", build_qwen3_5, **QWEN3_5)
MOE = Family("qwen3_5_moe", build_qwen3_5_moe, **QWEN3_5)
