"""`headstart convert`: from a released checkpoint to an MLX one that keeps its head.

    model-*.safetensors         the trunk, as mlx-lm would have written it, and the vision tensors
    mtp/weights.safetensors     the head, where no `*.safetensors` pattern of mlx-lm or mlx-vlm finds it
    norms/weights.safetensors   the trunk's norms in float32
    ngrams/weights.safetensors  tables of n-gram embeddings, copied as they are

A plan is made of mlx's lazy arrays: sizes are known before a weight is read, and an array is computed when it is
written.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import constants, metadata_save
from mlx_lm.utils import make_shards

from .. import models
from ..errors import CheckpointError, HeadError
from ..kernels.norms import Norm
from ..kernels.weights import NVFP4_MOST
from .atomic import publish, require_space, staging_folder
from .head import CARD
from .hub import COMPANION_FILES
from .layout import NORMS, Layout, head_field, readme_metadata
from .names import Names, is_head, is_vision
from .parameters import Stored, parameter_shapes, quantization_of
from .quantize import Choose, Quantization, Recipe, choose_quantization, stored_quantization
from .read import LazyFiles, open_file, read_parameter
from .safetensors import INDEX, Progress, read_header, shard_files, write_safetensors
from .tables import TABLES, copy_tables
from .wrapped import refuse_wrapped

SIDECAR = "mtp/weights.safetensors"
PARTS = ("weight", "scales", "biases", "global_scale")
VISUAL = ("model.visual.", "visual.")

Arrays = dict[str, mx.array]  # what a file will hold, not computed yet


@dataclass(frozen=True)
class Conversion:
    """What will be written where."""

    source: Layout
    destination: Path
    recipe: Recipe
    files: dict[str, Arrays]  # by their paths in the new folder
    config: dict[str, Any]
    original: str | None  # the hub id of the source, where it is known

    @property
    def nbytes(self) -> int:
        tables = sum(table.nbytes for table in self.source.tables)
        return sum(array.nbytes for arrays in self.files.values() for array in arrays.values()) + tables


def plan_conversion(source: Layout, destination: Path, recipe: Recipe, original: str | None = None) -> Conversion:
    """Decide what every tensor becomes, or raise an error if the source cannot be converted."""
    refuse_wrapped(source.path, source.config, "weights are not converted", "Take `mlx_lm.convert`.")
    if source.layout == "converted":
        raise CheckpointError(
            f"{source.path}: already converted to MLX. Name the original; "
            "`headstart graft` brings a head back to a converted model that lost it."
        )
    if source.mtp.location and not source.mtp.available:
        raise HeadError(f"{source.path}: {source.mtp.reason}")
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise CheckpointError(f"{destination}: exists already. Name a new folder, or remove it first.")
    model = models.build(deepcopy(source.config))
    if source.mtp.available:
        model.share_missing(source.stored)
    mlx_lm_names = {Names(source.config).canonical(name): name for name in parameter_shapes(model.lm)}
    names = {name: mlx_lm_names[name] for name in parameter_shapes(model.weights) if not is_head(name)}
    choose = recipe.for_trunk(model.lm)
    trunk, quantized = _convert_parameters(names, source.stored, model, choose, recipe)
    modules = dict(model.weights.named_modules())
    norms = {new: trunk[new] for name, new in names.items() if isinstance(modules[name.rpartition(".")[0]], Norm)}
    trunk |= {name: array.astype(recipe.dtype) for name, array in norms.items()}
    files = {}
    shards = make_shards(trunk | _convert_vision(source.path, recipe.dtype))  # of about 5 GB, as mlx-lm cuts them
    for number, shard in enumerate(shards, 1):
        of = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        files[f"model{of}.safetensors"] = shard
    if source.mtp.available:
        files[SIDECAR] = convert_head(source.stored, model, recipe)
    if recipe.dtype != mx.float32 and model.family.norm_offset and not model.family.norms_stay:
        files[NORMS] = norms
    return Conversion(source, destination, recipe, files, _new_config(source, recipe, quantized), original)


def convert(plan: Conversion, progress: Progress = lambda written: None) -> None:
    """Write the plan's folder, which appears whole or not at all. This uses up the plan's arrays."""
    destination = plan.destination.absolute()
    require_space(destination, plan.nbytes)
    companions, index = _companion_files(plan.source.path), _new_index(plan.files)
    with staging_folder(destination) as folder:
        for name, arrays in plan.files.items():
            write_safetensors(folder / name, arrays, progress)
        if plan.source.tables:
            copy_tables(folder / TABLES, plan.source.tables, progress)
        if plan.source.head_card is not None:
            shutil.copyfile(plan.source.head_folder / CARD, folder / CARD)
        for path in companions:
            shutil.copyfile(path, folder / path.name)
        (folder / INDEX).write_text(json.dumps(index, indent=4))
        _write_readme(folder / "README.md", plan)
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


def convert_head(stored: Stored, model: models.Model, recipe: Recipe) -> Arrays:
    """Return the head that `convert` keeps and `graft` brings back, its norms in float32."""
    names = {name: name for name in parameter_shapes(model.weights) if is_head(name)}
    return _convert_parameters(names, stored, model, recipe.for_head(model.family.head), recipe)[0]


def _convert_parameters(
    names: dict[str, str], stored: Stored, model: models.Model, choose: Choose, recipe: Recipe
) -> tuple[Arrays, dict[str, Quantization]]:
    """Convert the parameters `names`, given with the names to write them under. What is quantised stays as it is,
    unless fewer bits or another mode are wanted, or all is widened.

    Returns:
        The arrays, norms in float32, and how modules are quantised.
    """
    modules, files = dict(model.weights.named_modules()), LazyFiles()
    arrays: Arrays = {}
    quantized: dict[str, Quantization] = {}
    for name, written in names.items():
        path, _, leaf = name.rpartition(".")
        module = written.removesuffix(".weight")
        how = choose_quantization(module, modules[path], choose) if leaf == "weight" else None
        if leaf == "weight" and f"{path}.scales" in stored:
            kept = quantization_of(path, modules[path], stored) or {}
            parts = {
                part: read_parameter(f"{path}.{part}", stored, files, stored[f"{path}.{part}"].dtype)
                for part in PARTS
                if f"{path}.{part}" in stored
            }
            fits = how is None or (kept["mode"] == how.get("mode", "affine") and kept["bits"] <= how["bits"])
            if fits and not recipe.dequantize:
                quantized[module] = kept
                arrays |= {f"{module}.{part}": values for part, values in parts.items()}
                continue
            array = _dequantised(parts, kept)
            array = array.astype(recipe.dtype) if recipe.dequantize else array
        else:
            offset = model.family.norm_offset if isinstance(modules[path], Norm) else None
            offset = 0.0 if offset is not None and model.family.norms_stay else offset
            array = read_parameter(name, stored, files, recipe.dtype, norm_offset=offset)
        if how:
            quantized[module] = how
            arrays |= {f"{module}.{part}": a for part, a in zip(PARTS, mx.quantize(array, **how), strict=False)}
        else:
            arrays[written] = array
    return arrays, quantized


def _dequantised(parts: dict[str, mx.array], how: Quantization) -> mx.array:
    """Return the numbers of a matrix [N, K] or of one for each expert [E, N, K], in float32."""
    weight, scales, biases = parts["weight"], parts["scales"], parts.get("biases")
    if biases is not None:  # MLX computes in the type of affine scales
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    array = mx.dequantize(weight, scales, biases, how["group_size"], how["bits"], how["mode"], dtype=mx.float32)
    whole = parts.get("global_scale")
    return array if whole is None else array * (whole / NVFP4_MOST)[..., None, None]


def _convert_vision(path: Path, dtype: mx.Dtype) -> Arrays:
    """Return the vision tensors, unquantised, named and laid out as in mlx-vlm; mlx-lm skips them by that name."""
    arrays, files = {}, LazyFiles()
    for file in shard_files(path, is_vision):
        for name in read_header(file).tensors:
            if not is_vision(name) or name.endswith("position_ids"):
                continue
            array = open_file(file, files).pop(name)
            if array.ndim == 5:
                array = array.moveaxis(1, -1)  # [O, I, T, H, W] → [O, T, H, W, I]
            written = next((f"vision_tower.{name.removeprefix(p)}" for p in VISUAL if name.startswith(p)), name)
            arrays[written] = array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
    return arrays


def declare_head(config: dict[str, Any], file: str) -> None:
    """Add to config.json that there is a head, and where: without it no program drafts."""
    # Where Headstart, MTPLX, OptiQ and oMLX look first: an unusable head in another place is ignored.
    config["mlx_lm_extra_tensors"] = {"mtp_file": file}
    if not models.head_modules(config):
        models.text_config(config)[head_field(config)] = 1


def _new_config(source: Layout, recipe: Recipe, quantized: dict[str, Quantization]) -> dict[str, Any]:
    config = deepcopy(source.config)
    config.pop("quantization_config", None)  # of float8, which is gone
    dtype = str(recipe.dtype).removeprefix("mlx.core.")
    for part in (config, models.text_config(config)):
        for field in ("dtype", "torch_dtype"):
            if field in part:
                part[field] = dtype
    if quantized:
        config["quantization"] = config["quantization_config"] = stored_quantization(quantized, recipe)
    if source.mtp.available:
        declare_head(config, SIDECAR)
    return config


def _new_index(files: dict[str, Arrays]) -> dict[str, Any]:
    """Return an index of the shards alone: a program that reads all of it must find the model that mlx-lm knows."""
    shards = {name: arrays for name, arrays in files.items() if "/" not in name}
    return {
        "metadata": {"total_size": sum(array.nbytes for arrays in shards.values() for array in arrays.values())},
        "weight_map": dict(sorted((name, file) for file, arrays in shards.items() for name in arrays)),
    }


def _write_readme(path: Path, plan: Conversion) -> None:
    """Write a README with the source's metadata, which says what it was made from."""
    metadata = readme_metadata(plan.source.path)
    tags = metadata["tags"] if isinstance(metadata.get("tags"), list) else []
    metadata |= {"library_name": "mlx", "tags": sorted({*(tag for tag in tags if isinstance(tag, str)), "mlx"})}
    if plan.original:  # else the source's own base_model stays
        metadata["base_model"] = plan.original
    head = f"Its MTP head is in `{SIDECAR}`." if plan.source.mtp.available else "The original has no MTP head."
    path.write_text(
        f"\n# {plan.destination.name}\n\n"
        f"{plan.original or plan.source.path.name}, converted to MLX by headstart {version('headstart')}. {head}\n",
        encoding="utf-8",
    )
    metadata_save(path, metadata)
