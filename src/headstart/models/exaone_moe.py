"""K-EXAONE: sliding windows with RoPE, full attention without. Its head is wired as Qwen3.5's and has no experts."""

from dataclasses import replace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import exaone_moe

from ..kernels.layers import Attention
from .family import plain_family
from .mixers import grouped_attention


def exaone_attention(layer: nn.Module) -> Attention:
    """Describe attention that rotates queries and keys in some layers only."""
    return grouped_attention(layer, window=layer.window, rotates=layer.self_attn.use_rope)


def build_exaone(config: dict[str, Any]) -> nn.Module:
    """Build mlx-lm's model. transformers 5 says `mlp_layer_types` where releases said `is_moe_layer`."""
    if "is_moe_layer" not in config:
        config = {**config, "is_moe_layer": [kind == "sparse" for kind in config["mlp_layer_types"]]}
    lm = exaone_moe.Model(exaone_moe.ModelArgs.from_dict(config))
    for layer in lm.layers:
        layer.window = lm.args.sliding_window if layer.is_sliding_window else None
    lm.mtp_layer_type = (config.get("mtp_layer_types") or config["layer_types"])[0]
    lm.mtp_window = (config.get("mtp_sliding_windows") or [lm.args.sliding_window])[0]
    return lm


def exaone_head_layer(lm: nn.Module) -> nn.Module:
    kinds = [lm.mtp_layer_type, *lm.args.layer_types]  # whether full attention has RoPE depends on all of them
    layer = exaone_moe.DecoderLayer(replace(lm.args, layer_types=kinds, is_moe_layer=[False]), 0)
    layer.window = lm.mtp_window if layer.is_sliding_window else None
    return layer


FAMILY = plain_family(
    "exaone_moe",
    exaone_moe,
    build=build_exaone,
    mixer=exaone_attention,
    head_layer=exaone_head_layer,
    renamed=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),),
)
