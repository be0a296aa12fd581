"""What tensors are called, in releases and in conversions, and which parameter of the model each belongs to.

The model's names are upstream's without prefixes:

- raw, expert 7 of it: `model.language_model.layers.0.mlp.experts.7.up_proj.weight`
- converted: `language_model.model.layers.0.mlp.switch_mlp.up_proj.weight`
- the model's: `layers.0.mlp.switch_mlp.up_proj.weight`

All that is known of names is here. What is done to values is in `read.py`.
"""

import re

PREFIX = re.compile(r"^(?:(?:model|language_model)\.)+")
VISION = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.")
EXPERT = re.compile(r"^(.+\.mlp)\.experts\.(\d{1,6})\.(gate_proj|up_proj|down_proj)\.(\w+)$")
FUSED = re.compile(r"^(.+\.mlp)\.experts\.(gate_up_proj|down_proj)(?:\.(weight|scales|biases))?$")


def canonical(name: str) -> str:
    return PREFIX.sub("", name)


def is_vision(name: str) -> bool:
    return canonical(name).startswith(VISION)


def is_head(name: str) -> bool:
    return canonical(name).startswith("mtp.")


def is_text(name: str) -> bool:
    return not is_head(name) and not is_vision(name)


def parameters_in(name: str) -> list[tuple[str, int | None, int | None]]:
    """Return parameter, expert and half for what the tensor `name` holds; `gate_up_proj` holds two, gate first."""
    name = canonical(name)
    if match := EXPERT.match(name):
        mlp, expert, projection, leaf = match.groups()
        return [(f"{mlp}.switch_mlp.{projection}.{leaf}", int(expert), None)]
    if match := FUSED.match(name):
        mlp, projection, leaf = match.groups(default="weight")
        if projection == "gate_up_proj":
            return [(f"{mlp}.switch_mlp.{half}_proj.{leaf}", None, i) for i, half in enumerate(("gate", "up"))]
        return [(f"{mlp}.switch_mlp.down_proj.{leaf}", None, None)]
    return [(name, None, None)]
