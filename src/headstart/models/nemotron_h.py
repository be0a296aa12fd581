"""Nemotron-H and Nemotron 3: layers of one part each, Mamba-2, attention without positions, an MLP or experts.

The head is one attention and one layer of experts, given hidden states after the final norm, as in vLLM and SGLang.
"""

from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
from mlx_lm.models import nemotron_h

from ..errors import CheckpointError
from ..kernels.layers import Attention, FeedForward, Mamba2, Mixer, Part
from .family import Family
from .head import HeadNames, HeadSpec

HEAD = "*E"  # the only pattern that has been released


class HeadBlocks(nn.Module):
    """The two blocks of the head, `mtp.layers.0` and `mtp.layers.1` in a release."""

    def __init__(self, args: nemotron_h.ModelArgs):
        super().__init__()
        self.first, self.second = (nemotron_h.NemotronHBlock(args, kind) for kind in HEAD)


def build_nemotron(config: dict[str, Any]) -> nn.Module:
    kinds = nemotron_h.ModelArgs._block_type_to_char
    pattern = config.get("mtp_hybrid_override_pattern") or config.get("mtp_layers_block_type") or HEAD
    if (found := "".join(kinds.get(each, each) for each in pattern)) != HEAD:
        raise CheckpointError(f"config.json: the head's layers are {found!r}; only {HEAD!r} is known.")
    return nemotron_h.Model(nemotron_h.ModelArgs.from_dict(config))


def nemotron_parts(layer: nn.Module) -> list[Part]:
    blocks = [layer.first, layer.second] if isinstance(layer, HeadBlocks) else [layer]
    return [Part(block.norm, nemotron_part(block)) for block in blocks]


def nemotron_part(block: nn.Module) -> Mixer | FeedForward:
    """Describe a block by its type: Mamba-2, attention without rotation, an MLP (-) or experts (E)."""
    part = block.mixer
    if block.block_type == "M":
        return Mamba2(part)
    if block.block_type == "*":
        return Attention(part, part.num_heads, part.num_key_value_heads, rotates=False)
    return FeedForward(part)


FAMILY = Family(
    "nemotron_h",
    build_nemotron,
    text=lambda lm: SimpleNamespace(
        embed_tokens=lm.backbone.embeddings, layers=lm.backbone.layers, norm=lm.backbone.norm_f
    ),
    lm_head=lambda lm: lm.lm_head,
    head_layer=lambda lm: HeadBlocks(lm.args),
    parts=nemotron_parts,
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
