"""`headstart convert`: from a released checkpoint to an MLX one that keeps its head.

    model-*.safetensors         the trunk, as mlx-lm would have written it, and the vision tensors
    mtp/weights.safetensors     the head, where no `*.safetensors` pattern of mlx-lm or mlx-vlm finds it
    norms/weights.safetensors   the trunk's norms in float32

Sizes are known from the headers, so the whole plan is made before a weight is read.
"""

import json
import shutil
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCard, ModelCardData, constants
from mlx_lm.utils import make_shards

from .. import models
from ..errors import CheckpointError, HeadError
from ..models.base import Norm
from .atomic import publish, require_space, staging_folder
from .hub import COMPANION_FILES
from .layout import NORMS, Layout
from .parameters import Source, Stored, StoredParameter, canonical, is_head, is_vision, parameter_shapes
from .quantize import Choose, Progress, Recipe, TensorPlan, choose_quantization, write_file
from .safetensors import INDEX, read_header, shard_files

SIDECAR = "mtp/weights.safetensors"
VISUAL = ("model.visual.", "visual.")


@dataclass(frozen=True)
class Conversion:
    """What will be written where."""

    source: Layout
    destination: Path
    recipe: Recipe
    files: dict[str, list[TensorPlan]]  # by their paths in the new folder
    config: dict[str, Any]
    original: str | None  # the hub id of the source, where it is known

    @property
    def read_bytes(self) -> int:
        return sum(plan.stored.nbytes for plans in self.files.values() for plan in plans)

    @property
    def write_bytes(self) -> int:
        return sum(plan.nbytes for plans in self.files.values() for plan in plans)


def plan_conversion(source: Layout, destination: Path, recipe: Recipe, original: str | None = None) -> Conversion:
    """Decide what every tensor becomes, or raise an error if the source cannot be converted."""
    if source.layout != "raw":
        raise CheckpointError(
            f"{source.path}: already converted to MLX. Name the original; "
            "`headstart graft` brings a head back to a converted model that lost it."
        )
    if source.mtp.location and not source.mtp.available:
        raise HeadError(f"{source.path}: {source.mtp.reason}")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise CheckpointError(f"{destination}: exists already. Name a new folder, or remove it first.")
    model = models.build(deepcopy(source.config))
    trunk = [*_plan_trunk(source, model, recipe), *_plan_vision(source.path, recipe.dtype)]
    shards = make_shards({plan.name: plan for plan in trunk})  # of about 5 GB, as mlx-lm cuts them
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    files = {name: list(shard.values()) for name, shard in zip(names, shards, strict=True)}
    if source.mtp.available:
        files[SIDECAR] = plan_head(source.stored, model.weights, recipe)
    if recipe.dtype != mx.float32:
        files[NORMS] = [replace(plan, dtype=mx.float32) for plan in trunk if plan.shift]
    return Conversion(source, destination, recipe, files, _new_config(source, recipe, trunk), original)


def convert(plan: Conversion, progress: Progress = lambda read: None) -> None:
    """Write the plan's folder. It appears whole or not at all."""
    destination = plan.destination.absolute()
    require_space(destination, plan.write_bytes)
    companions = _companion_files(plan.source.path)
    with staging_folder(destination) as folder:
        for name, plans in plan.files.items():
            write_file(folder / name, plans, progress)
        for path in companions:
            shutil.copyfile(path, folder / path.name)
        (folder / INDEX).write_text(json.dumps(_new_index(plan.files), indent=4))
        (folder / "README.md").write_text(_new_readme(plan), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps(plan.config, indent=4))
        publish(folder, destination)


def _companion_files(source: Path) -> list[Path]:
    """Return the small files that a conversion keeps.

    A cloned repository may hold links to anything on this machine, and conversions are made to be published: only
    links that stay in the model's folder or in the Hugging Face cache are followed.
    """
    found = {path for pattern in COMPANION_FILES for path in source.glob(pattern) if path.is_file()}
    kept = [path for path in found if path.name != "config.json" and not path.name.endswith(".index.json")]
    roots = [source.resolve(), Path(constants.HF_HUB_CACHE).resolve()]
    if source.absolute().parent.name == "snapshots":  # a cache in another place
        roots.append(source.absolute().parents[1].resolve())
    for path in kept:
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise CheckpointError(
                f"{path}: a link to {path.resolve()}, outside the model's folder. Put a copy of the file in its "
                "place, or remove the link."
            )
    return kept


def plan_head(stored: Stored, weights: nn.Module, recipe: Recipe) -> list[TensorPlan]:
    """Plan the head that `convert` keeps and `graft` brings back, its norms in float32."""
    names = {name: name for name in parameter_shapes(weights) if is_head(name)}
    return list(_plan_tensors(names, stored, weights, recipe.for_head, recipe.dtype, norm_dtype=mx.float32))


def _plan_trunk(source: Layout, model: models.Model, recipe: Recipe) -> Iterator[TensorPlan]:
    mlx_lm_names = {canonical(name): name for name in parameter_shapes(model.lm)}
    names = {name: mlx_lm_names[name] for name in parameter_shapes(model.weights) if not is_head(name)}
    choose = recipe.for_trunk(model.lm)
    return _plan_tensors(names, source.stored, model.weights, choose, recipe.dtype, norm_dtype=recipe.dtype)


def _plan_tensors(
    names: dict[str, str], stored: Stored, weights: nn.Module, choose: Choose, dtype: mx.Dtype, norm_dtype: mx.Dtype
) -> Iterator[TensorPlan]:
    """Plan the parameters `names`, given with the names to write them under. What is quantised stays as it is."""
    modules = dict(weights.named_modules())
    for name, written in names.items():
        path, _, leaf = name.rpartition(".")
        if f"{path}.scales" in stored:
            parts = [part for part in (name, f"{path}.scales", f"{path}.biases") if part in stored]
            yield from (TensorPlan(part, stored[part], stored[part].dtype) for part in parts)
            continue
        quantization = None
        if leaf == "weight":
            quantization = choose_quantization(written.removesuffix(".weight"), modules[path], choose)
        is_norm = isinstance(modules[path], Norm)
        exact = mx.float32 if leaf == "A_log" else norm_dtype if is_norm else dtype
        scales = stored.get(f"{name}_scale_inv")
        yield TensorPlan(written, stored[name], exact, quantization, scales, shift=is_norm and stored[name].raw)


def declare_head(config: dict[str, Any], family: str, file: str) -> None:
    """Add to config.json that there is a head, and where: without it no program drafts."""
    # Where Headstart, MTPLX, OptiQ and oMLX look first: an unusable head in another place is ignored.
    config["mlx_lm_extra_tensors"] = {"mtp_file": file}
    if not models.head_modules(config):
        models.text_config(config)[head_field(family)] = 1


def head_field(family: str) -> str:
    """Return the field of config.json that promises a head."""
    return "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"


def _plan_vision(path: Path, dtype: mx.Dtype) -> Iterator[TensorPlan]:
    """Plan the vision tensors, unquantised, named and laid out as in mlx-vlm; mlx-lm skips them by that name."""
    for header in map(read_header, shard_files(path, is_vision)):
        for name, tensor in header.tensors.items():
            if not is_vision(name) or name.endswith("position_ids"):
                continue
            stored = StoredParameter((Source(tensor, "raw"),), tensor.shape)
            written = next((f"vision_tower.{name.removeprefix(p)}" for p in VISUAL if name.startswith(p)), name)
            kept = dtype if mx.issubdtype(tensor.dtype, mx.floating) else tensor.dtype
            yield TensorPlan(written, stored, kept, channels_last=len(tensor.shape) == 5)


def _new_config(source: Layout, recipe: Recipe, trunk: list[TensorPlan]) -> dict[str, Any]:
    config = deepcopy(source.config)
    config.pop("quantization_config", None)  # of float8, which is gone
    dtype = str(recipe.dtype).removeprefix("mlx.core.")
    for part in (config, models.text_config(config)):
        for field in ("dtype", "torch_dtype"):
            if field in part:
                part[field] = dtype
    if recipe.quantises:
        common = {"group_size": recipe.group_size, "bits": recipe.bits}
        differing = {
            plan.name.removesuffix(".weight"): plan.quantization
            for plan in trunk
            if plan.quantization and plan.quantization != common
        }
        bits = recipe.bits or min(each["bits"] for each in differing.values())
        quantization = {"group_size": recipe.group_size, "bits": bits, "mode": "affine", **differing}
        config["quantization"] = config["quantization_config"] = quantization
    if source.mtp.available:
        declare_head(config, source.family, SIDECAR)
    return config


def _new_index(files: dict[str, list[TensorPlan]]) -> dict[str, Any]:
    """Return an index of the shards alone: a program that reads all of it must find the model that mlx-lm knows."""
    shards = {name: plans for name, plans in files.items() if "/" not in name}
    outputs = [(output, file) for file, plans in shards.items() for plan in plans for output in plan.outputs]
    return {
        "metadata": {"total_size": sum(output.nbytes for output, _ in outputs)},
        "weight_map": dict(sorted((output.name, file) for output, file in outputs)),
    }


def _new_readme(plan: Conversion) -> str:
    try:
        card = ModelCard.load(plan.source.path / "README.md")
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError):  # missing or broken
        card = ModelCard.from_template(ModelCardData(), template_str="---\n{{ card_data }}\n---\n")
    card.data.library_name = "mlx"
    tags = card.data.tags if isinstance(card.data.tags, list) else []
    card.data.tags = sorted({*(tag for tag in tags if isinstance(tag, str)), "mlx"})
    if plan.original:  # else the source's own base_model stays
        card.data.base_model = plan.original
    head = f"Its MTP head is in `{SIDECAR}`." if plan.source.mtp.available else "The original has no MTP head."
    return (
        f"---\n{card.data.to_yaml()}\n---\n\n# {plan.destination.name}\n\n"
        f"{plan.original or plan.source.path.name}, converted to MLX by headstart {version('headstart')}. {head}\n"
    )
