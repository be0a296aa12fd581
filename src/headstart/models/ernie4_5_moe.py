"""ERNIE-4.5 with experts. Its head has no norm of its own at the end but the trunk's, as in the vendor's FastDeploy.

mlx-lm leaves out the bias that chooses experts; this router has it, like transformers' and vLLM's.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import ernie4_5_moe

from .family import plain_family
from .head import HeadNames, HeadSpec


class BiasedRouter(nn.Module):
    """Choose experts by softmax and a bias, and weigh them by the softmax alone, all in float32."""

    def __init__(self, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.weight = mx.zeros((experts, hidden))
        self.e_score_correction_bias = mx.zeros((1, experts))
        self.top_k = top_k

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        scores = mx.softmax(x.astype(mx.float32) @ self.weight.astype(mx.float32).T, axis=-1)
        choice = -(scores + self.e_score_correction_bias)
        indices = mx.argpartition(choice, kth=self.top_k - 1, axis=-1)[..., : self.top_k]
        scores = mx.take_along_axis(scores, indices, axis=-1)
        return indices, scores / mx.maximum(scores.sum(axis=-1, keepdims=True), 1e-12)


def build_ernie(config: dict[str, Any]) -> nn.Module:
    if config.get("moe_layer_end_index") == -1:  # the last
        config = {**config, "moe_layer_end_index": None}
    if config.get("moe_gate_act", "softmax") != "softmax":
        raise ValueError(f"moe_gate_act {config['moe_gate_act']!r}: only softmax is known")
    lm = ernie4_5_moe.Model(ernie4_5_moe.ModelArgs.from_dict({"use_bias": False, **config}))
    for layer in lm.layers:
        if isinstance(layer.mlp, ernie4_5_moe.Ernie4_5_MoeMLP):
            layer.mlp["gate"] = BiasedRouter(lm.args.hidden_size, lm.args.moe_num_experts, lm.args.moe_k)
    return lm


def ernie_head_layer(lm: nn.Module) -> nn.Module:
    """Return a layer without experts."""
    return ernie4_5_moe.Ernie4_5_DecoderLayer(replace(lm.args, moe_layer_start_index=1), 0)


FAMILY = plain_family(
    "ernie4_5_moe",
    ernie4_5_moe,
    build=build_ernie,
    head_layer=ernie_head_layer,
    head=HeadSpec(
        in_layer=True,
        own_norm=False,
        names=HeadNames("mtp_linear_proj", "mtp_emb_norm", "mtp_hidden_norm"),
        released_as="mtp.layers.{module}.",
    ),
    renamed=(
        (r"^mtp_(emb_norm|hidden_norm|linear_proj)\.(\d+)\.", r"mtp.layers.\2.mtp_\1."),
        (r"^mtp_block\.(\d+)\.", r"mtp.layers.\1."),
        (r"\.mlp\.(?:gate\.)?moe_statics\.", ".mlp.gate."),
    ),
)
