"""DeepSeek-V3 and V3.1: latent attention, and a head like a further layer of the trunk, after its last."""

from collections.abc import Callable
from functools import partial

import mlx.nn as nn
from mlx_lm.models import deepseek_v3

from .family import plain_family
from .head import HeadNames, HeadSpec
from .mixers import latent_attention

# As in SGLang and transformers. vLLM sets the embedding of the first pair to zero, which only it does.
NEXTN = HeadSpec(
    own_lm_head=True,
    own_embedding=True,
    in_layer=True,
    names=HeadNames("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head"),
    released_as="layers.{layer}.",
)


def next_layer(layer: Callable[..., nn.Module], lm: nn.Module) -> nn.Module:
    """Return the layer after the trunk's last, which decides whether it has experts."""
    return layer(lm.args, lm.args.num_hidden_layers)


FAMILY = plain_family(
    "deepseek_v3",
    deepseek_v3,
    mixer=latent_attention,
    head_layer=partial(next_layer, deepseek_v3.DeepseekV3DecoderLayer),
    head=NEXTN,
)
