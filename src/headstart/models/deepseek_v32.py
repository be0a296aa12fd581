"""DeepSeek-V3.2 and GLM-5, 5.1, 5.2: latent attention to tokens that an index selects. Heads like DeepSeek-V3's.

In GLM-5.2 a layer that has no index attends to what the last one selected that has one. Heads select by their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.nn as nn
from mlx_lm.models import deepseek_v32

from ..errors import CheckpointError
from ..kernels.layers import LatentAttention
from .deepseek_v3 import NEXTN, next_layer
from .family import plain_family

SHARED, FULL = "shared", "full"
DEFAULTS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}  # transformers writes none


def prepare_selecting(layer: nn.Module, shared: bool = False) -> nn.Module:
    """Give a decoder layer what our forward reads. mlx-lm's norm of the index has another epsilon."""
    attention = layer.self_attn
    attention.budget = attention.indexer.index_topk
    attention.indexer.k_norm.eps = 1e-6
    if shared:
        attention.pop("indexer")
    return layer


def all_full(config: dict[str, Any]) -> list[str]:
    return [FULL] * config["num_hidden_layers"]


def indexer_types(config: dict[str, Any]) -> list[str]:
    """Return which layers have an index, as transformers reads config.json."""
    layers, kinds = config["num_hidden_layers"], config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
        kinds = [SHARED if max(layer - offset + 1, 0) % every else FULL for layer in range(layers)]
    kinds = [{"F": FULL, "S": SHARED}.get(each, each) for each in kinds]
    if len(kinds) != layers or kinds[0] != FULL or not {*kinds} <= {FULL, SHARED}:
        raise CheckpointError(f"config.json: indexer_types must name {FULL} or {SHARED} for {layers} layers.")
    return kinds


def build_selecting(
    config: dict[str, Any], interleaved: bool, kinds: Callable[[dict[str, Any]], list[str]]
) -> nn.Module:
    """Build mlx-lm's model. `kinds` says which layers have an index, whose rotation may be `interleaved`."""
    config = DEFAULTS | config | {"indexer_rope_interleave": interleaved}
    lm = deepseek_v32.Model(deepseek_v32.ModelArgs.from_dict(config))
    for layer, kind in zip(lm.layers, kinds(config), strict=True):
        prepare_selecting(layer, kind == SHARED)
    return lm


def selecting_attention(layer: nn.Module) -> LatentAttention:
    return LatentAttention(layer.self_attn, budget=layer.self_attn.budget)


_FIELDS: dict[str, Any] = {
    "mixer": selecting_attention,
    "head_layer": lambda lm: prepare_selecting(next_layer(deepseek_v32.DeepseekV32DecoderLayer, lm)),
    "head": NEXTN,
}
DEEPSEEK_V32 = plain_family(
    "deepseek_v32", deepseek_v32, build=partial(build_selecting, interleaved=False, kinds=all_full), **_FIELDS
)
GLM_MOE_DSA = plain_family(
    "glm_moe_dsa", deepseek_v32, build=partial(build_selecting, interleaved=True, kinds=indexer_types), **_FIELDS
)
