"""MiMo-7B: its head is given the hidden first, before the trunk's final norm, as in the vendor's code for vLLM.

MiMo-V2-Flash: sliding windows, attention sinks and experts. Each of its three head modules is given the trunk's
hidden states before the norm, as in SGLang. llama.cpp gives a module those of the module before it, with which
sglang-jax had 2.3 instead of 2.8 tokens per round (sglang-jax#1256); vLLM has the first module alone.
"""

import mlx.nn as nn
from mlx_lm.models import mimo, mimo_v2_flash

from ..kernels.layers import Attention
from .family import plain_family
from .head import HeadNames, HeadSpec
from .mixers import grouped_attention


def mimo_v2_attention(layer: nn.Module) -> Attention:
    window = layer.mlp.config.sliding_window_size if layer.is_sliding_window else None
    return grouped_attention(layer, window=window, value_scale=layer.self_attn.value_scale)


MIMO = plain_family(
    "mimo",
    mimo,
    head_layer=lambda lm: mimo.TransformerBlock(lm.args),
    head=HeadSpec(
        embedding_first=False,
        fed_after_norm=False,
        first_embedding_is_zero=True,
        in_layer=True,
        names=HeadNames("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
        released_as="mtp_layers.{module}.",
    ),
)
MIMO_V2_FLASH = plain_family(
    "mimo_v2_flash",
    mimo_v2_flash,
    mixer=mimo_v2_attention,
    head_layer=lambda lm: mimo_v2_flash.DecoderLayer(lm.args, is_moe=False, is_sliding_window=True),
    head=HeadSpec(
        fed_after_norm=False,
        chains_after_norm=False,
        chained=False,
        in_layer=True,
        modules=3,
        names=HeadNames("eh_proj", "enorm", "hnorm", "final_layernorm"),
        released_as="mtp.layers.{module}.",
    ),
    renamed=((r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),),
)
