"""`headstart graft`: give a converted model that lost its head the head of the original.

Of the original only config.json, the index, the files that hold the head and, where it is on disk, the final norm are
read, or downloaded. The result is what `convert` would have kept with the same --mtp-bits and --group-size, byte for
byte.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .. import models
from ..errors import CheckpointError, HeadError
from .atomic import replace_file, require_space, staging_folder
from .config import read_config
from .convert import SIDECAR, Arrays, convert_head, declare_head
from .draft_vocabulary import NAME
from .head import CARD, check_final_norm, check_sizes, read_head
from .layout import Layout, expected_model
from .parameters import find_misfit
from .quantize import Recipe
from .safetensors import Progress, write_safetensors
from .wrapped import refuse_wrapped


@dataclass(frozen=True)
class Graft:
    """What will be written into the model's folder."""

    model: Layout
    arrays: Arrays
    beside: tuple[str, ...] = ()  # files that come with the head
    source: Path | None = None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def require_lost_head(model: Layout) -> None:
    """Refuse a model that needs no graft, before anything is downloaded."""
    refuse_wrapped(model.path, model.config, "heads are not known", "Run it as it is.")
    if model.layout == "gguf" or (model.layout == "raw" and models.head_modules(model.config)):
        raise CheckpointError(f"{model.path}: not converted to MLX. `headstart convert` keeps the head.")
    if model.mtp.available:
        raise HeadError(f"{model.path}: has its head already, in {model.mtp.location}.")


def plan_graft(
    model: Layout, source: Path, *, mtp_bits: str | int | None = None, group_size: int | None = None
) -> Graft:
    """Decide what the head becomes, or raise an error if it does not fit.

    Args:
        mtp_bits: As in `Recipe`.
        group_size: None takes the trunk's.
    """
    require_lost_head(model)
    check_sizes(model.path, model.config, str(source), read_config(source, drafter=True))
    head = read_head(source)
    expected = expected_model(model.path, model.config)
    expected.share_missing(head)
    if problem := find_misfit(head, expected.weights, head=True):
        raise HeadError(f"{source}: its MTP head does not fit {model.path}: {problem}. Name the original.")
    check_final_norm(model.path, model.config, model.stored, source)
    quantised = any(name.endswith(".scales") for name in head)
    if quantised and (mtp_bits is not None or group_size is not None):
        raise HeadError(
            f"{source}: its head is quantised already. Leave --mtp-bits and --group-size out, or name the original."
        )
    quantization = model.quantization or {"bits": None, "mode": None}
    if group_size is None:  # modes other than affine have groups of their own
        group_size = quantization["group_size"] if quantization["mode"] == "affine" else 64
    recipe = Recipe(getattr(mx, model.dtype), quantization["bits"], group_size, mtp_bits=mtp_bits)
    beside = tuple(name for name in (CARD, NAME) if (source / name).is_file() and not (model.path / name).exists())
    return Graft(model, convert_head(head, expected, recipe), beside, source)


def graft(plan: Graft, progress: Progress = lambda written: None) -> None:
    """Write the head and config.json, so that the folder is always a usable model. This uses up the plan's arrays."""
    folder = plan.model.path
    require_space(folder, plan.nbytes)
    config = deepcopy(plan.model.config)
    declare_head(config, SIDECAR)
    with staging_folder(folder / "mtp") as temporary:
        write_safetensors(temporary / "head", plan.arrays, progress)
        (temporary / "config").write_text(json.dumps(config, indent=4))
        for number, name in enumerate(plan.beside):
            assert plan.source is not None
            shutil.copyfile(plan.source / name, temporary / str(number))
            replace_file(temporary / str(number), folder / name)
        replace_file(temporary / "config", folder / "config.json")
        replace_file(temporary / "head", folder / SIDECAR)
