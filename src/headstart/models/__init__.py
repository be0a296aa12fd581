"""One file per family: mlx-lm's modules, our forward. `family.py` says what a family provides."""

from typing import Any

from ..errors import CheckpointError
from ..kernels.norms import use_float32_norms
from . import (
    deepseek_v3,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    llama,
    longcat_flash,
    mimo,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_next,
    step3p5,
)
from .family import Family
from .head import Head, HeadSpec, Weights
from .model import Model

FAMILIES: dict[str, Family] = {
    "qwen3_5": qwen3_5.DENSE,
    "qwen3_5_text": qwen3_5.DENSE,
    "qwen3_5_moe": qwen3_5.MOE,
    "qwen3_5_moe_text": qwen3_5.MOE,
    "qwen3_next": qwen3_next.FAMILY,
    "glm4_moe": glm4_moe.GLM4_MOE,
    "glm4_moe_lite": glm4_moe.GLM4_MOE_LITE,
    "deepseek_v3": deepseek_v3.FAMILY,
    "mimo": mimo.MIMO,
    "mimo_v2_flash": mimo.MIMO_V2_FLASH,
    "step3p5": step3p5.FAMILY,
    "exaone_moe": exaone_moe.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "longcat_flash": longcat_flash.FAMILY,
    "llama": llama.LLAMA,
    "mistral": llama.LLAMA,
    "mistral3": llama.MISTRAL3,
    "ministral3": llama.MINISTRAL3,
    "qwen2": qwen3.QWEN2,
    "qwen3": qwen3.QWEN3,
    "qwen3_moe": qwen3.QWEN3_MOE,
}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's text part: the whole of it where there is no other."""
    return config.get("text_config", config)


def head_modules(config: dict[str, Any]) -> int:
    """Return how many modules of a head config.json promises; 0 where it promises none."""
    text = text_config(config)
    family = FAMILIES[config["model_type"]]
    if family.head_layer is None:
        return 0
    count = int(text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers") or 0)
    return family.head.modules or (min(count, 1) if text.get("mtp_share_layers") else count)


def build(config: dict[str, Any], head: bool = True) -> Model:
    """Return the modules that config.json describes, unquantised, their weights random and not yet computed."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not one of {', '.join(sorted(FAMILIES))}. "
            "Headstart runs models of these families only."
        )
    family, shape = FAMILIES[model_type], text_config(config)
    lm = family.build(config)
    use_float32_norms(lm)
    text, mtp = family.text(lm), None
    if head and family.head_layer is not None:
        layers = [family.head_layer(lm) for _ in range(head_modules(config) or 1)]
        mtp = Head(family.head, layers, shape["hidden_size"], shape["vocab_size"], text.norm.eps)
        use_float32_norms(mtp)
    return Model(family, shape, lm, Weights(text, family.lm_head(lm), mtp))


__all__ = [
    "FAMILIES",
    "Family",
    "Head",
    "HeadSpec",
    "Model",
    "Weights",
    "build",
    "head_modules",
    "text_config",
]
