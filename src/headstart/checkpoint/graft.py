"""`headstart graft`: give a converted model that lost its head the head of the original.

Of the original only config.json, the index and the files that hold `mtp.*` are read, or downloaded. What is written
is what `convert` would have kept with the same --mtp-bits and --group-size, byte for byte.
"""

import dataclasses
import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import cards, models
from ..errors import CheckpointError, HeadError
from ..models.base import Norm
from . import identity, provenance
from .config import read_config
from .convert import SIDECAR, declare_head, head_steps
from .headers import Header, read_header
from .index import INDEX, read_index, shards
from .layout import Layout, expected_weights, find_sidecar
from .names import is_head
from .pack import Progress, Step, write_file
from .parameters import Stored, gather, misfit
from .recipe import MtpBits, Recipe
from .rows import Reader
from .write import replace, require_room, staged, write_text

MERGED = "model-mtp.safetensors"
# What must be equal for a head to fit, in the order in which a difference says most.
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
    steps: list[Step]
    file: str  # where the head goes
    merge: bool
    compared: int  # tensors of the trunk that the head's files also hold, and that are the model's

    @property
    def read_bytes(self) -> int:
        return sum(step.read_bytes for step in self.steps)

    @property
    def write_bytes(self) -> int:
        return sum(step.nbytes for step in self.steps)


@dataclass(frozen=True)
class HeadFiles:
    """The files of a checkpoint that hold its head, and what else of the model is in them."""

    head: dict[str, Stored]
    trunk: dict[str, Stored]


def check_fits(model: Layout, source: str, config: dict[str, Any]) -> None:
    """Refuse the head of a model of other sizes, before any of it is downloaded."""
    theirs, ours = models.text_config(config), models.text_config(model.config)
    family = models.FAMILIES[config["model_type"]].name
    if family != model.family:
        raise HeadError(f"{source}: another model, {family} where {model.path} is {model.family}.")
    for field in SIZES:
        if theirs.get(field) == ours.get(field):
            continue
        if field == "num_experts":
            raise HeadError(
                f"{source}: its head has {theirs.get(field)} experts and {model.path} has {ours.get(field)}. A model "
                "whose experts were merged or pruned has no head that fits: run it without one."
            )
        raise HeadError(
            f"{source}: another model, its {field} is {theirs.get(field)} and that of {model.path} is "
            f"{ours.get(field)}. Name the original that {model.path.name} was converted from."
        )


def check_name(model: Layout, source: Path | str, original: str | None) -> None:
    """Refuse the head of a model that has the same sizes but another name. `source` is a folder or a hub id."""
    if original and not _may_be(original, source, model.family):
        raise HeadError(
            f"{source}: another model, {model.path} was converted from {original}. Name that one, or say --force if "
            "it was fine-tuned from this one."
        )


def read_head(source: Path) -> HeadFiles:
    """The head of a checkpoint of any layout, from the headers of its own files alone."""
    config = read_config(source)
    if sidecar := find_sidecar(source, config):
        header = read_header(sidecar)
        return HeadFiles(gather([header], [provenance.of_sidecar(header)], head=True, bare=True), {})
    headers = [found for file in _head_files(source) if (found := _with_head(file))]
    if not headers:
        promised = "promises one but" if models.head_modules(config) else "promises none and"
        raise HeadError(f"{source}: has no MTP head, config.json {promised} no file holds it. Name the original.")
    kinds = provenance.of_shards(headers)
    return HeadFiles(gather(headers, kinds, head=True), gather(headers, kinds, head=False))


def plan_graft(
    model: Layout,
    source: Path,
    *,
    mtp_bits: MtpBits | None = None,
    group_size: int | None = None,
    merge: bool = False,
    force: bool = False,
) -> Graft:
    """Decide what the head becomes, or say why it does not fit. Without `group_size` its groups are the trunk's."""
    if model.layout != "converted":
        raise CheckpointError(f"{model.path}: not converted to MLX. `headstart convert` keeps the head.")
    if model.mtp.available:
        raise HeadError(f"{model.path}: has a usable head already, in {model.mtp.location}.")
    check_fits(model, str(source), read_config(source))
    found = read_head(source)
    weights = expected_weights(model.path, model.config)
    flat: Any = tree_flatten(weights.parameters())
    shapes = {name: array.shape for name, array in flat if is_head(name)}
    if problem := misfit(found.head, shapes, dict(weights.named_modules())):
        raise HeadError(f"{source}: its MTP head does not fit {model.path}: {problem}.")
    if any(part.sources[0].provenance is None for part in found.head.values()):
        raise HeadError(
            f"{source}: nothing says whether the norms of its head are stored as w or as 1 + w. Name the original."
        )
    compared = 0 if force else _compare_trunks(model, source, found.trunk)
    packed = any(name.endswith(".scales") for name in found.head)
    if packed and (mtp_bits is not None or group_size is not None):
        raise HeadError(
            f"{source}: its head is quantised already. Leave --mtp-bits and --group-size out, or name the original."
        )
    trunk = model.quantization or {"bits": None, "mode": None}
    dtype: mx.Dtype = getattr(mx, model.dtype)
    if group_size is None:
        group_size = trunk["group_size"] if trunk["mode"] == "affine" else 64  # other modes have groups of their own
    recipe = Recipe(dtype, trunk["bits"], group_size, mtp_bits=mtp_bits)
    steps = head_steps(found.head, weights, recipe)
    if merge:
        outer = "" if model.family == "qwen3_next" else "language_model."
        steps = [dataclasses.replace(step, name=outer + step.name) for step in steps]
    return Graft(model, source, steps, MERGED if merge else SIDECAR, merge, compared)


def graft(plan: Graft, progress: Progress = lambda read: None) -> None:
    """Write the head, and let config.json and, merged, the index know. At every moment the folder is a model."""
    folder = plan.model.path
    require_room(folder, plan.write_bytes)
    with staged(folder / plan.file) as temporary:
        with Reader() as reader:
            write_file(temporary / "head", plan.steps, reader, progress)
        write_text(temporary / "config", json.dumps(_config(plan), indent=4))
        if plan.merge:
            write_text(temporary / "index", json.dumps(_index(plan), indent=4))
        replace(temporary / "config", folder / "config.json")
        replace(temporary / "head", folder / plan.file)
        if plan.merge:
            replace(temporary / "index", folder / INDEX)


def _may_be(original: str, source: Path | str, family: str) -> bool:
    """Whether the source is that model, in whatever precision, or nothing says what it is."""
    if isinstance(source, Path) and source.absolute().name.lower() == original.rpartition("/")[2].lower():
        return True
    name = source if isinstance(source, str) else _name(source, family)
    card = cards.find_card(original)
    return name is None or name.lower() == original.lower() or (card is not None and name.lower() in card.names)


def _name(source: Path, family: str) -> str | None:
    """What the model in a folder is called: by the cache, by a card that the folder is named after, or by the README
    of a conversion. A release's README names the model that it was trained from, which is another one."""
    if found := identity.hub_id(source):
        return found
    if card := cards.match_card((), source.absolute().name, family):
        return card.hub_id or card.name
    converted = any(part.sources[0].provenance == "converted" for part in read_head(source).head.values())
    return identity.base_model(source) if converted else None


def _head_files(source: Path) -> list[Path]:
    index = source / INDEX
    if not index.exists():
        return sorted(source.glob("*.safetensors"))
    return [source / file for file in shards(source, is_head)]


def _with_head(file: Path) -> Header | None:
    header = read_header(file)
    return header if any(is_head(name) for name in header.tensors) else None


def _compare_trunks(model: Layout, source: Path, trunk: dict[str, Stored]) -> int:
    """The head's files may hold norms and other vectors of the trunk: are they this model's? Says how many were."""
    norms = {
        n for n, module in expected_weights(model.path, model.config).named_modules() if isinstance(module, Norm)
    }
    compared = 0
    with Reader() as reader, mx.stream(mx.cpu):
        for name, theirs in trunk.items():
            ours = model.stored.get(name)
            if ours is None or len(theirs.shape) != 1 or theirs.shape != ours.shape:
                continue
            shift = name.removesuffix(".weight") in norms and theirs.sources[0].provenance == "raw"
            expected = reader.whole(theirs).astype(mx.float32) + (1.0 if shift else 0.0)
            # Conversions round to half precision.
            if not mx.allclose(reader.whole(ours).astype(mx.float32), expected, rtol=2**-7, atol=1e-5):
                raise HeadError(
                    f"{source}: another model, its {name} is not that of {model.path}. Name the original, or say "
                    "--force if the model was fine-tuned from this one."
                )
            compared += 1
    return compared


def _config(plan: Graft) -> dict[str, Any]:
    config = deepcopy(plan.model.config)
    declare_head(config, plan.model.family, plan.file)
    return config


def _index(plan: Graft) -> dict[str, Any]:
    folder = plan.model.path
    index = read_index(folder)
    if index is None:
        headers = [read_header(file) for file in sorted(folder.glob("model*.safetensors")) if file.name != MERGED]
        size = sum(tensor.nbytes for header in headers for tensor in header.tensors.values())
        weight_map = {name: header.path.name for header in headers for name in header.tensors}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    # Of a head that could not be used nothing stays in the index.
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not is_head(name)}
    index["weight_map"] |= {output.name: plan.file for step in plan.steps for output in step.outputs}
    metadata = index.get("metadata") or {}
    index["metadata"] = metadata | {"total_size": int(metadata.get("total_size", 0)) + plan.write_bytes}
    return index
