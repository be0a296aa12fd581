"""`headstart graft`: give a converted model that lost its head the head of the original.

Of the original only config.json, the index and the files that hold `mtp.*` are read, or downloaded. The result is
what `convert` would have kept with the same --mtp-bits and --group-size, byte for byte.
"""

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import cards, models
from ..errors import CheckpointError, HeadError
from ..models.base import Norm
from .atomic import replace_file, require_space, staging_folder
from .config import read_config
from .convert import SIDECAR, declare_head, plan_head
from .layout import Layout, base_model_id, expected_weights, find_sidecar, hub_id
from .parameters import Stored, find_misfit, find_parameters, is_head
from .quantize import Progress, Recipe, TensorPlan, read_whole, write_file
from .safetensors import INDEX, read_header, read_index, shard_files

MERGED = "model-mtp.safetensors"
# What must be equal for a head to fit, the most telling difference first.
SIZES = (
    "num_experts", "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
)  # fmt: skip


@dataclass(frozen=True)
class Graft:
    """What will be written into the model's folder."""

    model: Layout
    source: Path
    plans: list[TensorPlan]
    file: str  # where the head goes
    merge: bool
    compared: int  # tensors of the trunk that the head's files also hold, and that are the model's

    @property
    def read_bytes(self) -> int:
        return sum(plan.stored.nbytes for plan in self.plans)

    @property
    def write_bytes(self) -> int:
        return sum(plan.nbytes for plan in self.plans)


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


def check_name(model: Layout, source: Path | str, original: str | None) -> None:
    """Refuse the head of a model that has the same sizes but another name. `source` is a folder or a hub id."""
    if original is None:
        return
    name = source if isinstance(source, str) else _name(source, model.family)
    card = cards.find_card(original)
    names = {original.lower(), *(card.names if card else ())}  # of the model in any precision
    folder = original.rpartition("/")[2].lower()
    named_alike = isinstance(source, Path) and source.absolute().name.lower() == folder
    if name is not None and name.lower() not in names and not named_alike:
        raise HeadError(
            f"{source}: another model, {model.path} was converted from {original}. Name that one, or say --force if "
            "it was fine-tuned from this one."
        )


def _name(source: Path, family: str) -> str | None:
    """Return what a model is called by the cache, by a card with the folder's name, or by a conversion's README.

    The README of a release names the model that it was trained from, which is another one.
    """
    if found := hub_id(source):
        return found
    if card := cards.match_card((), source.absolute().name, family):
        return card.hub_id or card.name
    head, _ = read_head(source)
    converted = any(part.sources[0].provenance == "converted" for part in head.values())
    return base_model_id(source) if converted else None


def read_head(source: Path) -> tuple[Stored, Stored]:
    """Return the head of a checkpoint of any layout, and what its files hold of the trunk, from their headers."""
    config = read_config(source)
    if sidecar := find_sidecar(source, config):
        return find_parameters([read_header(sidecar)], head=True, sidecar=True), {}
    headers = [read_header(file) for file in shard_files(source, is_head)]
    headers = [header for header in headers if any(map(is_head, header.tensors))]
    if not headers:
        promised = "promises one but" if models.head_modules(config) else "promises none and"
        raise HeadError(f"{source}: has no MTP head, config.json {promised} no file holds it. Name the original.")
    return find_parameters(headers, head=True), find_parameters(headers, head=False)


def plan_graft(
    model: Layout,
    source: Path,
    *,
    mtp_bits: str | int | None = None,
    group_size: int | None = None,
    merge: bool = False,
    force: bool = False,
) -> Graft:
    """Decide what the head becomes, or raise an error if it does not fit.

    Args:
        mtp_bits: As in `Recipe`.
        group_size: None takes the trunk's.
        merge: Make the file one of the shards, listed in the index.
        force: Take the head of a model with other weights, such as the base of a fine-tune.
    """
    if model.layout != "converted":
        raise CheckpointError(f"{model.path}: not converted to MLX. `headstart convert` keeps the head.")
    if model.mtp.available:
        raise HeadError(f"{model.path}: has a usable head already, in {model.mtp.location}.")
    check_sizes(model, str(source), read_config(source))
    head, trunk = read_head(source)
    weights = expected_weights(model.path, model.config)
    if problem := find_misfit(head, weights, head=True):
        raise HeadError(f"{source}: its MTP head does not fit {model.path}: {problem}. Name the original.")
    compared = 0 if force else _compare_trunks(model, source, trunk, weights)
    quantised = any(name.endswith(".scales") for name in head)
    if quantised and (mtp_bits is not None or group_size is not None):
        raise HeadError(
            f"{source}: its head is quantised already. Leave --mtp-bits and --group-size out, or name the original."
        )
    quantization = model.quantization or {"bits": None, "mode": None}
    if group_size is None:  # modes other than affine have groups of their own
        group_size = quantization["group_size"] if quantization["mode"] == "affine" else 64
    recipe = Recipe(getattr(mx, model.dtype), quantization["bits"], group_size, mtp_bits=mtp_bits)
    plans = plan_head(head, weights, recipe)
    if merge and model.family != "qwen3_next":
        plans = [replace(plan, name=f"language_model.{plan.name}") for plan in plans]
    return Graft(model, source, plans, MERGED if merge else SIDECAR, merge, compared)


def _compare_trunks(model: Layout, source: Path, trunk: Stored, weights: nn.Module) -> int:
    """Refuse a source whose norms and other vectors, where the head's files hold them, are not the model's.

    Returns:
        How many were compared.
    """
    modules = dict(weights.named_modules())
    compared = 0
    for name, theirs in trunk.items():
        ours = model.stored.get(name)
        if ours is None or len(theirs.shape) != 1 or theirs.shape != ours.shape:
            continue
        shift = theirs.raw and isinstance(modules.get(name.removesuffix(".weight")), Norm)
        with mx.stream(mx.cpu):
            expected = read_whole(theirs).astype(mx.float32) + (1.0 if shift else 0.0)
            # Conversions round to half precision.
            equal = mx.allclose(read_whole(ours).astype(mx.float32), expected, rtol=2**-7, atol=1e-5)
        if not equal:
            raise HeadError(
                f"{source}: another model, its {name} is not that of {model.path}. Name the original, or say "
                "--force if the model was fine-tuned from this one."
            )
        compared += 1
    return compared


def graft(plan: Graft, progress: Progress = lambda read: None) -> None:
    """Write the head, then config.json and, merged, the index. At every moment the folder is a usable model."""
    folder = plan.model.path
    require_space(folder, plan.write_bytes)
    config = deepcopy(plan.model.config)
    declare_head(config, plan.model.family, plan.file)
    with staging_folder(folder / plan.file) as temporary:
        write_file(temporary / "head", plan.plans, progress)
        (temporary / "config").write_text(json.dumps(config, indent=4))
        if plan.merge:
            (temporary / "index").write_text(json.dumps(_new_index(plan), indent=4))
        replace_file(temporary / "config", folder / "config.json")
        replace_file(temporary / "head", folder / plan.file)
        if plan.merge:
            replace_file(temporary / "index", folder / INDEX)


def _new_index(plan: Graft) -> dict[str, Any]:
    folder = plan.model.path
    index = read_index(folder)
    if index is None:
        headers = [read_header(file) for file in sorted(folder.glob("model*.safetensors")) if file.name != MERGED]
        size = sum(tensor.nbytes for header in headers for tensor in header.tensors.values())
        weight_map = {name: header.path.name for header in headers for name in header.tensors}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    # Drop the tensors of a head that could not be used.
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not is_head(name)}
    index["weight_map"] |= {output.name: plan.file for each in plan.plans for output in each.outputs}
    metadata = index.get("metadata") or {}
    index["metadata"] = metadata | {"total_size": int(metadata.get("total_size", 0)) + plan.write_bytes}
    return index
