"""Nemotron-H and Nemotron 3: layers of one part each, Mamba-2, attention without positions, an MLP or experts.

The head is one attention and one layer of experts, given hidden states after the final norm, as in vLLM and SGLang.
"""

from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import nemotron_h

from ..errors import CheckpointError
from .attention import grouped_attention, grouped_kv_sizes
from .family import Family
from .head import HeadNames, HeadSpec
from .mamba2 import mamba2, mamba2_sizes
from .part import Part, PartKind

KINDS = {"M": PartKind.RECURRENT, "*": PartKind.ATTENTION, "-": PartKind.MLP, "E": PartKind.MLP}
HEAD = "*E"  # the only pattern that has been released


class HeadBlocks(nn.Module):
    """The two blocks of the head, `mtp.layers.0` and `mtp.layers.1` in a release."""

    def __init__(self, args: nemotron_h.ModelArgs):
        super().__init__()
        self.first, self.second = (prepare_block(nemotron_h.NemotronHBlock(args, kind)) for kind in HEAD)


def prepare_block(block: nn.Module) -> nn.Module:
    """Give an attention layer the names of fields that our forward reads."""
    if block.block_type == "*":
        block.mixer.n_heads, block.mixer.n_kv_heads = block.mixer.num_heads, block.mixer.num_key_value_heads
    return block


def build_nemotron(config: dict[str, Any]) -> nn.Module:
    kinds = nemotron_h.ModelArgs._block_type_to_char
    pattern = config.get("mtp_hybrid_override_pattern") or config.get("mtp_layers_block_type") or HEAD
    if (found := "".join(kinds.get(each, each) for each in pattern)) != HEAD:
        raise CheckpointError(f"config.json: the head's layers are {found!r}; only {HEAD!r} is known.")
    lm = nemotron_h.Model(nemotron_h.ModelArgs.from_dict(config))
    for block in lm.layers:
        prepare_block(block)
    return lm


def nemotron_parts(layer: nn.Module) -> list[Part]:
    blocks = [layer.first, layer.second] if isinstance(layer, HeadBlocks) else [layer]
    return [Part(KINDS[block.block_type], block.norm, block.mixer) for block in blocks]


FAMILY = Family(
    "nemotron_h",
    build_nemotron,
    text=lambda lm: SimpleNamespace(
        embed_tokens=lm.backbone.embeddings, layers=lm.backbone.layers, norm=lm.backbone.norm_f
    ),
    lm_head=lambda lm: lm.lm_head,
    head_layer=lambda lm: HeadBlocks(lm.args),
    parts=nemotron_parts,
    recurrent=mamba2,
    state_sizes=mamba2_sizes,
    attention=grouped_attention,
    kv_sizes=grouped_kv_sizes,
    head=HeadSpec(
        in_layer=True,
        names=HeadNames("first.eh_proj", "first.enorm", "first.hnorm", "second.final_layernorm"),
        released_as="mtp.layers.{module}.",
    ),
    renamed=(
        (r"^embeddings\.", "embed_tokens."),
        (r"^norm_f\.", "norm."),
        (r"^mtp\.layers\.0\.(?!first\.|second\.)", "mtp.layers.0.first."),
        (r"^mtp\.layers\.1\.", "mtp.layers.0.second."),
        (r"\.mixer\.experts\.(\d+)\.up_proj\.", r".mixer.experts.\1.fc1."),
        (r"\.mixer\.experts\.(\d+)\.down_proj\.", r".mixer.experts.\1.fc2."),
    ),
)
