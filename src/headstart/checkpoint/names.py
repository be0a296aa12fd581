"""What tensors are called, in releases and in conversions, and which parameter of the model each belongs to.

The model's names are upstream's without prefixes, and the head's are under `mtp.`:

- raw, expert 7 of it: `model.language_model.layers.0.mlp.experts.7.up_proj.weight`
- converted: `language_model.model.layers.0.mlp.switch_mlp.up_proj.weight`
- the model's: `layers.0.mlp.switch_mlp.up_proj.weight`
- the head of a DeepSeek-V3 with 61 layers: `model.layers.61.eh_proj.weight` → `mtp.layers.0.eh_proj.weight`

All that is known of names is here. What is done to values is in `read.py`.
"""

import re
from typing import Any, NamedTuple

from .. import models
from .config import ASSISTANTS

PREFIX = re.compile(r"^(?:(?:model|language_model|backbone)\.)+")
VISION = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "vit_large_projector.",
    "vision_embedder.", "embed_vision.", "embed_audio.", "audio_tower.",  # Gemma 4's
)  # fmt: skip
EXPERT = re.compile(r"^(.+\.(?:mlp|mixer))\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj|fc1|fc2)\.(\w+)$")
FUSED = re.compile(r"^(.+\.mlp|layers\.\d+)\.experts\.(gate_up_proj|down_proj)(?:\.(weight|scales|biases))?$")
GROUPED = re.compile(r"^(.+\.self_attn\.o_a_proj)\.(?:weight|scales|biases)$")
LATENT = re.compile(r"^(.+\.(?:self_attn|attention)(?:\.\d)?)\.kv_b_proj\.(weight)$")

PARTS = {  # of layers that `inspect` counts, by how their tensors' names go on
    "index": re.compile(r"\.(?:indexer\.|index_\w+\.)"),
    "entries": re.compile(r"\.compressor\.(?!indexer)"),
    "streams": re.compile(
        r"(?:^|\.)(?:\w+_hc|norm\.hc|\w+_hyper_connection|hyper_connection_mixer)\.|(?:^|\.)norm\.input_mix_"
    ),
}
FINAL_NORMS = ("norm.weight", "norm.hc_norm.weight")  # of one residual stream, or of several


def without_prefix(name: str) -> str:
    return PREFIX.sub("", name)


def is_vision(name: str) -> bool:
    return without_prefix(name).startswith(VISION)


def is_table(name: str) -> bool:
    """Return whether a tensor belongs to a table of n-gram embeddings, which is no parameter."""
    return ".ple_embedding." in name


def is_head(name: str) -> bool:
    """Return whether a parameter, by the model's name, is the head's."""
    return name.startswith("mtp.")


class ParameterPart(NamedTuple):
    """What a tensor is of a parameter: all of it, one expert, or with `half` a part of what the tensor holds."""

    parameter: str
    expert: int | None = None
    half: int | None = None  # 0, 1: of `gate_up_proj`, gate first; of `kv_b_proj`, keys first
    heads: tuple[int, int, int] | None = None  # of `kv_b_proj`: their number, sizes of a key and of a value
    groups: int | None = None  # of `o_a_proj`: matrices that a release has below one another


class Names:
    """The names of one model's tensors, which depend on its family and on how many layers it has."""

    def __init__(self, config: dict[str, Any]):
        family, text = models.family_of(config), models.text_config(config)
        self.norm_offset = family.norm_offset
        self.drafter = config.get("drafter", ASSISTANTS[0]) not in ASSISTANTS  # every tensor is the head's
        self.heads = tuple(text.get(name) for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
        # LongCat's experts without weights: transformers 5 writes tensors for them, which nothing reads.
        self.experts = text.get("n_routed_experts") if "zero_expert_num" in text else None
        self.groups = text.get("o_groups")
        unread = family.unread(text)
        self.unread = re.compile(unread) if unread else None
        layers, spec = int(text.get("num_hidden_layers") or 0), family.head
        self.renamed = [(re.compile(pattern), ours) for pattern, ours in family.renamed]
        self.released = {
            spec.released_as.format(layer=layers + module, module=module): f"mtp.layers.{module}."
            for module in range(models.head_modules(config) or 1)
            if spec.in_layer and family.head_layer is not None
        }

    def canonical(self, name: str) -> str:
        """Return the model's name for the tensor `name`, except that experts are not stacked yet."""
        name = without_prefix(name)
        if self.drafter:
            return f"mtp.{name.removeprefix('mtp.')}"
        for pattern, ours in self.renamed:
            name = pattern.sub(ours, name)
        for released, ours in self.released.items():
            if name.startswith(released):
                return ours + name.removeprefix(released)
        return name

    def is_head(self, name: str) -> bool:
        return is_head(self.canonical(name))

    def is_final_norm(self, name: str) -> bool:
        return self.canonical(name) in FINAL_NORMS

    def is_text(self, name: str) -> bool:
        return not self.is_head(name) and not is_vision(name)

    def parts(self, name: str) -> list[ParameterPart]:
        """Return what the tensor `name` holds."""
        name = self.canonical(name)
        if self.unread is not None and self.unread.match(name):
            return []
        if match := EXPERT.match(name):
            mlp, expert, projection, leaf = match.groups()
            if self.experts is not None and int(expert) >= self.experts:
                return []
            return [ParameterPart(f"{mlp}.switch_mlp.{projection}.{leaf}", int(expert))]
        if match := FUSED.match(name):
            mlp, projection, leaf = match.groups(default="weight")
            stacked = f"{mlp}.switch_mlp" if mlp.endswith(".mlp") else f"{mlp}.experts.switch_glu"  # Gemma 4's
            if projection == "gate_up_proj":
                both = (f"{stacked}.gate_proj.{leaf}", f"{stacked}.up_proj.{leaf}")
                return [ParameterPart(parameter, half=half) for half, parameter in enumerate(both)]
            return [ParameterPart(f"{stacked}.down_proj.{leaf}")]
        if (match := LATENT.match(name)) and None not in self.heads:
            attention, leaf = match.groups()
            both, heads = (f"{attention}.embed_q.{leaf}", f"{attention}.unembed_out.{leaf}"), self.heads
            return [ParameterPart(parameter, None, half, heads) for half, parameter in enumerate(both)]  # type: ignore[arg-type]
        if self.groups and GROUPED.match(name):
            return [ParameterPart(name, groups=self.groups)]
        return [ParameterPart(name)]
