"""Heads that are not in the model's own shards: beside them, in the original's folder, or in a drafter's."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import models
from ..errors import HeadError
from .assistant import is_assistant
from .config import read_config
from .names import FINAL_NORMS, Names
from .parameters import Stored, find_parameters
from .read import read_parameter
from .repack import repacked
from .safetensors import read_header, shard_files

SIDECARS = ("mtp.safetensors", "model-mtp.safetensors", "mtp/weights.safetensors")
CARD = "mtp/card.toml"  # what `train-head` measured
ROUNDING = 2**-6  # a norm of the same model may have been through bfloat16, as w or as 1 + w
# What must be equal for a head to fit, the most telling difference first; the head's own shapes tell the rest.
SIZES = (
    "num_experts", "n_routed_experts", "moe_num_experts", "hidden_size", "vocab_size", "num_hidden_layers",
    "num_attention_heads", "intermediate_size",
)  # fmt: skip


def sidecar_names(config: dict[str, Any]) -> list[str]:
    """Return where a head may be beside the shards. MTPLX and OptiQ name the file in config.json."""
    named = (config.get("mlx_lm_extra_tensors") or {}).get("mtp_file")
    return [str(named), *SIDECARS] if named else [*SIDECARS]


def find_sidecar(path: Path, config: dict[str, Any]) -> Path | None:
    """Return the file of a head beside the shards, which takes precedence over a head inside them."""
    return next((path / name for name in sidecar_names(config) if (path / name).is_file()), None)


def read_head(source: Path) -> Stored:
    """Return the head of a checkpoint of any layout, or of a drafter's folder, from the headers of its files."""
    config = read_config(source, drafter=True)
    names = Names(config)
    if not names.drafter and (sidecar := find_sidecar(source, config)):
        return find_parameters(repacked([read_header(sidecar)], config), names, head=True, sidecar=True)
    headers = [read_header(file) for file in shard_files(source, names.is_head)]
    head = find_parameters(repacked(headers, config), names, head=True)
    if not head:
        promised = "promises one but" if models.head_modules(config) else "promises none and"
        raise HeadError(f"{source}: has no MTP head, config.json {promised} no file holds it. Name the original.")
    return head


def check_sizes(path: Path, config: dict[str, Any], source: str, other: dict[str, Any]) -> None:
    """Refuse the head of a `source` whose config.json, `other`, is of another family or size than the model's."""
    if is_assistant(other):
        raise HeadError(f"{source}: an assistant, which is no head: name it with --drafter.")
    theirs, ours = models.text_config(other), models.text_config(config)
    families = [models.family_of(each).name for each in (other, config)]
    if families[0] != families[1]:
        raise HeadError(f"{source}: another model, {families[0]} where {path} is {families[1]}.")
    for field in SIZES:
        if theirs.get(field) != ours.get(field):
            remedy = f"Name the original that {path.name} was converted from."
            if field.endswith("_experts"):
                remedy = "A model whose experts were merged or pruned has no head that fits: run it without one."
            sizes = f"its {field} is {theirs.get(field)} and that of {path} is {ours.get(field)}"
            raise HeadError(f"{source}: another model, {sizes}. {remedy}")


def check_final_norm(
    path: Path, config: dict[str, Any], trunk: Stored, source: Path, name: str | None = None
) -> None:
    """Refuse the head of another model of the same sizes, which the trunk's final norm tells.

    `name` is what errors call the source, by default its folder. A source of which only the head is on disk, and a
    drafter's folder, have none: then nothing is compared.
    """
    names = Names(read_config(source, drafter=True))
    if names.drafter:
        return
    files = shard_files(source, names.is_final_norm)
    theirs = find_parameters([read_header(file) for file in files if file.exists()], names, head=False)
    if (norm := next((each for each in FINAL_NORMS if each in theirs), None)) is None:
        return
    family = models.family_of(config)
    how: dict[str, Any] = {"norm_offset": family.norm_offset, "norms_stay": family.norms_stay}
    ours, other = (read_parameter(norm, each, {}, mx.float32, **how) for each in (trunk, theirs))
    if not mx.allclose(ours, other, rtol=ROUNDING, atol=ROUNDING):
        raise HeadError(
            f"{name or source}: another model of the same sizes: its final norm ({norm}) is not that of "
            f"{path}. Name the original that {path.name} was converted from."
        )
