"""Step-3.5-Flash, Step-3.7-Flash: sliding windows, a gate for every head, limited activations, norms of 1 + w.

Their three head modules are chained: each is given the hidden states of the one before it, before the norm, as in
vLLM, SGLang and StepFun's llama.cpp. transformers' `MtpModel` chains them after the norm, and drafts with the trunk's
output layer, which in vLLM cost nearly all acceptance (vllm#38493).
"""

from dataclasses import replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import step3p5

from ..errors import CheckpointError
from ..images import StepRules
from ..kernels.norms import use_float32_norms
from .deepseek_v3 import NEXTN
from .family import plain_family
from .mixers import grouped_attention
from .step3p7_vision import StepTower
from .vision import Vision

PER_LAYER = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits_shared")


def prepare_step3p5(layer: nn.Module, args: step3p5.ModelArgs) -> nn.Module:
    """Give a decoder layer the norms and fields that our forward reads."""
    use_float32_norms(layer, step3p5.ZeroCenteredRMSNorm)
    attention = layer.self_attn
    attention.n_heads, attention.n_kv_heads = attention.num_heads, attention.num_kv_heads
    layer.window = args.sliding_window if layer.is_sliding else None
    return layer


def build_step3p5(config: dict[str, Any]) -> nn.Module:
    lm = step3p5.Model(step3p5.ModelArgs.from_dict(config))
    use_float32_norms(lm, step3p5.ZeroCenteredRMSNorm)
    for layer in lm.layers:
        prepare_step3p5(layer, lm.args)
    return lm


def step3p5_head_layer(lm: nn.Module) -> nn.Module:
    """Return the layer after the trunk's last. `layer_types` and other lists of a release include the head's."""
    for name in PER_LAYER:
        listed = getattr(lm.args, name)
        of_head = listed[lm.args.num_hidden_layers :] if isinstance(listed, list) else []
        if any(each != of_head[0] for each in of_head):
            raise CheckpointError(f"config.json: {name} differs among the head's layers; only like ones are known.")
    return prepare_step3p5(step3p5.Step3p5DecoderLayer(lm.args, lm.args.num_hidden_layers), lm.args)


def build_step3p7(config: dict[str, Any]) -> nn.Module:
    """Build Step-3.7's language model, which is Step-3.5's. Only its full attention has scaled rotations."""
    text = {"yarn_only_types": ["full_attention"], **config["text_config"], "model_type": "step3p5"}
    if text.get("mtp_layer_types"):  # where transformers 5 has the head's
        text["layer_types"] = [*text["layer_types"], *text["mtp_layer_types"]]
    return build_step3p5(text)


FAMILY = plain_family(
    "step3p5",
    step3p5,
    build=build_step3p5,
    mixer=lambda layer: grouped_attention(layer, window=layer.window),
    head_layer=step3p5_head_layer,
    head=replace(NEXTN, fed_after_norm=False, chains_after_norm=False),
    renamed=(
        (r"\.transformer\.", "."),
        (r"\.shared_head\.output\.", ".shared_head.head."),
        (r"\.moe\.((?:gate|up|down)_proj)\.", r".mlp.switch_mlp.\1."),
        (r"\.moe\.gate\.", ".mlp.gate.gate."),
        (r"\.moe\.router_bias$", ".mlp.gate.router_bias"),
        (r"(?<!\.mlp)\.share_expert\.", ".mlp.share_expert."),
    ),
    norm_offset=1.0,
)
STEP3P7 = replace(FAMILY, name="step3p7", build=build_step3p7, vision=Vision(StepTower, StepRules))
