"""From the names in files to the names of the model, which are upstream's without prefixes.

- raw, expert 7 of it: `model.language_model.layers.0.mlp.experts.7.up_proj.weight`
- converted: `language_model.model.layers.0.mlp.switch_mlp.up_proj.weight`
- the model's: `layers.0.mlp.switch_mlp.up_proj.weight`
"""

import re
from dataclasses import dataclass

PREFIX = re.compile(r"^(?:(?:model|language_model)\.)+")
VISION = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
EXPERT = re.compile(r"^(.+\.mlp)\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.(\w+)$")
FUSED = re.compile(r"^(.+\.mlp)\.experts\.(gate_up_proj|down_proj)(?:\.(weight|scales|biases))?$")


@dataclass(frozen=True)
class Piece:
    """What a tensor in a file is to the model: a parameter, one expert of it, or a half of a fused tensor."""

    parameter: str
    expert: int | None = None
    half: int | None = None  # of axis -2


def canonical(name: str) -> str:
    return PREFIX.sub("", name)


def is_vision(name: str) -> bool:
    return canonical(name).startswith(VISION)


def is_head(name: str) -> bool:
    return canonical(name).startswith("mtp.")


def pieces(name: str) -> list[Piece]:
    """What the tensor `name` holds; a fused `gate_up_proj` holds two parameters, gate first."""
    name = canonical(name)
    if match := EXPERT.match(name):
        mlp, expert, projection, leaf = match.groups()
        return [Piece(f"{mlp}.switch_mlp.{projection}.{leaf}", expert=int(expert))]
    if match := FUSED.match(name):
        mlp, projection, leaf = match.groups(default="weight")
        if projection == "gate_up_proj":
            return [
                Piece(f"{mlp}.switch_mlp.gate_proj.{leaf}", half=0),
                Piece(f"{mlp}.switch_mlp.up_proj.{leaf}", half=1),
            ]
        return [Piece(f"{mlp}.switch_mlp.down_proj.{leaf}")]
    return [Piece(name)]
