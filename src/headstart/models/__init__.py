"""One file per family: mlx-lm's modules, our forward. `family.py` says what a family provides."""

from typing import Any

from ..errors import CheckpointError
from ..kernels.norms import use_float32_norms
from . import (
    bailing_hybrid,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    ernie4_5_moe,
    exaone_moe,
    gemma4,
    glm4_moe,
    glm5_next,
    llama,
    longcat_flash,
    mimo,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_next,
    qwen4_exp,
    step3p5,
)
from .family import Family
from .head import Head, HeadSpec, Weights
from .model import Model
from .wrapped import has_mlx_lm, wrapped_family

FAMILIES: dict[str, Family] = {
    "qwen3_5": qwen3_5.DENSE,
    "qwen3_5_text": qwen3_5.DENSE,
    "qwen3_5_moe": qwen3_5.MOE,
    "qwen3_5_moe_text": qwen3_5.MOE,
    "qwen3_next": qwen3_next.FAMILY,
    "qwen4_exp": qwen4_exp.FAMILY,
    "qwen4_exp_text": qwen4_exp.FAMILY,
    "glm4_moe": glm4_moe.GLM4_MOE,
    "glm4_moe_lite": glm4_moe.GLM4_MOE_LITE,
    "deepseek_v3": deepseek_v3.FAMILY,
    "deepseek_v32": deepseek_v32.DEEPSEEK_V32,
    "glm_moe_dsa": deepseek_v32.GLM_MOE_DSA,
    "deepseek_v4": deepseek_v4.FAMILY,
    "glm5_next": glm5_next.FAMILY,
    "glm5_next_text": glm5_next.FAMILY,
    "bailing_hybrid": bailing_hybrid.FAMILY,
    "mimo": mimo.MIMO,
    "mimo_v2_flash": mimo.MIMO_V2_FLASH,
    "step3p5": step3p5.FAMILY,
    "step3p7": step3p5.STEP3P7,
    "exaone_moe": exaone_moe.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "ernie4_5_moe": ernie4_5_moe.FAMILY,
    "longcat_flash": longcat_flash.FAMILY,
    "gemma4": gemma4.FAMILY,
    "gemma4_text": gemma4.FAMILY,
    "gemma4_unified": gemma4.FAMILY,
    "gemma4_unified_text": gemma4.FAMILY,
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


def is_ours(config: dict[str, Any]) -> bool:
    """Return whether a family of ours describes the model; mlx-lm runs others."""
    family = FAMILIES.get(config["model_type"])
    return family is not None and family.describes(config)


def family_of(config: dict[str, Any]) -> Family:
    """Return the family of a checked config.json: ours, or one of mlx-lm's."""
    model_type = config["model_type"]
    return FAMILIES[model_type] if is_ours(config) else wrapped_family(model_type)


def head_modules(config: dict[str, Any]) -> int:
    """Return how many modules of a head config.json promises; 0 where it promises none."""
    text = text_config(config)
    family = family_of(config)
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
        parts = family.head_parts(lm) if family.head_parts is not None else None
        mtp = Head(family.head, layers, shape["hidden_size"], shape["vocab_size"], text.norm.eps, parts)
        use_float32_norms(mtp)
    return Model(family, shape, lm, Weights(text, family.lm_head(lm), mtp, family.beside))


__all__ = [
    "FAMILIES",
    "Family",
    "Head",
    "HeadSpec",
    "Model",
    "Weights",
    "build",
    "family_of",
    "has_mlx_lm",
    "head_modules",
    "is_ours",
    "text_config",
]
