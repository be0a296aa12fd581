"""`headstart graft`: give a converted model that lost its head the head of the original.

Of the original only config.json, the index and the files that hold `mtp.*` are read, or downloaded. The result is
what `convert` would have kept with the same --mtp-bits and --group-size, byte for byte.
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import models
from ..errors import CheckpointError, HeadError
from .atomic import replace_file, require_space, staging_folder
from .config import read_config
from .convert import SIDECAR, Arrays, convert_head, declare_head
from .layout import Layout, expected_model, find_sidecar
from .names import Names
from .parameters import Stored, find_misfit, find_parameters
from .quantize import Recipe
from .safetensors import Progress, read_header, shard_files, write_safetensors

# What must be equal for a head to fit, the most telling difference first; the head's own shapes tell the rest.
SIZES = ("num_experts", "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Graft:
    """What will be written into the model's folder."""

    model: Layout
    arrays: Arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def require_lost_head(model: Layout) -> None:
    """Refuse a model that needs no graft, before anything is downloaded."""
    if model.layout != "converted":
        raise CheckpointError(f"{model.path}: not converted to MLX. `headstart convert` keeps the head.")
    if model.mtp.available:
        raise HeadError(f"{model.path}: has its head already, in {model.mtp.location}.")


def check_sizes(model: Layout, source: str, config: dict[str, Any]) -> None:
    """Refuse the head of a model of other sizes, before any of it is downloaded."""
    theirs, ours = models.text_config(config), models.text_config(model.config)
    family = models.FAMILIES[config["model_type"]].name
    if family != model.family:
        raise HeadError(f"{source}: another model, {family} where {model.path} is {model.family}.")
    for field in SIZES:
        if theirs.get(field) != ours.get(field):
            remedy = f"Name the original that {model.path.name} was converted from."
            if field == "num_experts":
                remedy = "A model whose experts were merged or pruned has no head that fits: run it without one."
            sizes = f"its {field} is {theirs.get(field)} and that of {model.path} is {ours.get(field)}"
            raise HeadError(f"{source}: another model, {sizes}. {remedy}")


def plan_graft(
    model: Layout, source: Path, *, mtp_bits: str | int | None = None, group_size: int | None = None
) -> Graft:
    """Decide what the head becomes, or raise an error if it does not fit.

    Args:
        mtp_bits: As in `Recipe`.
        group_size: None takes the trunk's.
    """
    require_lost_head(model)
    check_sizes(model, str(source), read_config(source))
    head = _read_head(source)
    expected = expected_model(model.path, model.config)
    expected.share_missing(head)
    if problem := find_misfit(head, expected.weights, head=True):
        raise HeadError(f"{source}: its MTP head does not fit {model.path}: {problem}. Name the original.")
    quantised = any(name.endswith(".scales") for name in head)
    if quantised and (mtp_bits is not None or group_size is not None):
        raise HeadError(
            f"{source}: its head is quantised already. Leave --mtp-bits and --group-size out, or name the original."
        )
    quantization = model.quantization or {"bits": None, "mode": None}
    if group_size is None:  # modes other than affine have groups of their own
        group_size = quantization["group_size"] if quantization["mode"] == "affine" else 64
    recipe = Recipe(getattr(mx, model.dtype), quantization["bits"], group_size, mtp_bits=mtp_bits)
    return Graft(model, convert_head(head, expected, recipe))


def _read_head(source: Path) -> Stored:
    """Return the head of a checkpoint of any layout, from the headers of its files."""
    config = read_config(source)
    names = Names(config)
    if sidecar := find_sidecar(source, config):
        return find_parameters([read_header(sidecar)], names, head=True, sidecar=True)
    head = find_parameters([read_header(file) for file in shard_files(source, names.is_head)], names, head=True)
    if not head:
        promised = "promises one but" if models.head_modules(config) else "promises none and"
        raise HeadError(f"{source}: has no MTP head, config.json {promised} no file holds it. Name the original.")
    return head


def graft(plan: Graft, progress: Progress = lambda written: None) -> None:
    """Write the head and config.json, so that the folder is always a usable model. This uses up the plan's arrays."""
    folder = plan.model.path
    require_space(folder, plan.nbytes)
    config = deepcopy(plan.model.config)
    declare_head(config, plan.model.family, SIDECAR)
    with staging_folder(folder / "mtp") as temporary:
        write_safetensors(temporary / "head", plan.arrays, progress)
        (temporary / "config").write_text(json.dumps(config, indent=4))
        replace_file(temporary / "config", folder / "config.json")
        replace_file(temporary / "head", folder / SIDECAR)
