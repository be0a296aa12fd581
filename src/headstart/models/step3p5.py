"""Step-3.5-Flash: sliding windows, a gate for every head of attention, limited activations, norms of 1 + w.

Its three head modules are chained: each is given the hidden states of the one before it, before the norm, as in vLLM
and SGLang. transformers' `MtpModel` chains them after the norm.
"""

from dataclasses import replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import step3p5

from ..kernels.norms import use_float32_norms
from .deepseek_v3 import NEXTN
from .family import plain_family
from .mixers import grouped_attention


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
    return prepare_step3p5(step3p5.Step3p5DecoderLayer(lm.args, lm.args.num_hidden_layers), lm.args)


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
