"""`headstart convert`: from a released checkpoint to an MLX one that keeps its head.

    model-*.safetensors         the trunk, as mlx-lm would have written it, and the vision tensors
    mtp/weights.safetensors     the head, where no `*.safetensors` pattern of mlx-lm or mlx-vlm finds it
    norms/weights.safetensors   the trunk's norms in float32

Sizes are known from the headers, so the whole plan is made before a weight is read.
"""

import json
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
from mlx.utils import tree_flatten
from mlx_lm.utils import make_shards

from .. import models
from ..errors import CheckpointError, HeadError
from ..models.base import Norm
from .headers import Header, read_header
from .hub import BESIDE
from .index import INDEX, shards
from .layout import NORMS, Layout, read_shards
from .names import canonical, is_head, is_vision
from .pack import Progress, Step, write_file
from .parameters import Source, Stored
from .recipe import Packing, Recipe
from .rows import Reader
from .write import copy, publish, require_room, staged, write_text

SIDECAR = "mtp/weights.safetensors"
VISUAL = ("model.visual.", "visual.")


@dataclass(frozen=True)
class Conversion:
    """What will be written where."""

    source: Layout
    destination: Path
    recipe: Recipe
    files: dict[str, list[Step]]  # by their paths in the new folder
    config: dict[str, Any]
    original: str | None  # the hub id of the source, where it is known

    @property
    def read_bytes(self) -> int:
        return sum(step.read_bytes for steps in self.files.values() for step in steps)

    @property
    def write_bytes(self) -> int:
        return sum(step.nbytes for steps in self.files.values() for step in steps)


def plan_conversion(source: Layout, destination: Path, recipe: Recipe, original: str | None = None) -> Conversion:
    """Decide what every tensor becomes, or say why the source cannot be converted."""
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
    packings: dict[str, Packing] = {}
    trunk = list(_trunk_steps(source, model, recipe, packings))
    trunk += _vision_steps(source.path, recipe.dtype)
    files = _shards(trunk)
    if source.mtp.available:
        files[SIDECAR] = head_steps(source.stored, model.weights, recipe)
    if recipe.dtype != mx.float32:
        files[NORMS] = [replace(step, dtype=mx.float32) for step in trunk if step.shift]
    config = _config(source, recipe, packings)
    return Conversion(source, destination, recipe, files, config, original)


def convert(plan: Conversion, progress: Progress = lambda read: None) -> None:
    """Write the plan's folder. It appears whole or not at all."""
    source, destination = plan.source.path, plan.destination.absolute()
    require_room(destination, plan.write_bytes)
    _beside(source)
    with staged(destination) as folder:
        with Reader() as reader:
            for name, steps in plan.files.items():
                write_file(folder / name, steps, reader, progress)
        for path in _beside(source):
            copy(path, folder / path.name)
        write_text(folder / INDEX, json.dumps(_index(plan.files), indent=4))
        write_text(folder / "README.md", _readme(plan))
        write_text(folder / "config.json", json.dumps(plan.config, indent=4))
        publish(folder, destination)


def _beside(source: Path) -> list[Path]:
    """Return the small files that a conversion keeps.

    A cloned repository may hold links to anything on this machine, and conversions are made to be published: only
    those that stay in the model's folder or in the Hugging Face cache are followed.
    """
    found = {path for pattern in BESIDE for path in source.glob(pattern) if path.is_file()}
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


def head_steps(stored: dict[str, Stored], weights: nn.Module, recipe: Recipe) -> list[Step]:
    """The head as `convert` keeps it and `graft` brings it back: norms in float32, the rest as the recipe says.

    What is packed already stays as it is.
    """
    modules = dict(weights.named_modules())
    steps = []
    for name in _parameters(weights):
        module, _, leaf = name.rpartition(".")
        if not is_head(name):
            continue
        if f"{module}.scales" in stored:
            parts = {n: stored[n] for n in (name, f"{module}.scales", f"{module}.biases") if n in stored}
            steps += [Step(n, part, part.dtype) for n, part in parts.items()]
            continue
        packing = recipe.of_head(module, modules[module]) if leaf == "weight" else None
        norm = isinstance(modules[module], Norm)
        steps.append(_step(name, name, stored, mx.float32 if norm else recipe.dtype, packing, norm))
    return steps


def declare_head(config: dict[str, Any], family: str, file: str) -> None:
    """Let config.json say that there is a head, and where: without it nobody drafts."""
    # Where we, MTPLX, OptiQ and oMLX look first: an unusable head in another place is passed over.
    config["mlx_lm_extra_tensors"] = {"mtp_file": file}
    if not models.head_modules(config):
        models.text_config(config)[head_field(family)] = 1


def head_field(family: str) -> str:
    """The field of config.json that promises a head."""
    return "num_nextn_predict_layers" if family == "qwen3_next" else "mtp_num_hidden_layers"


def _trunk_steps(source: Layout, model: models.Model, recipe: Recipe, packings: dict[str, Packing]) -> Iterator[Step]:
    """Under mlx-lm's names. `packings` takes what config.json must say of single modules."""
    theirs = {canonical(path): path for path in _parameters(model.lm)}
    modules = dict(model.weights.named_modules())
    choose = recipe.of_trunk(model.lm)
    for name in _parameters(model.weights):
        if is_head(name):
            continue
        module, _, leaf = name.rpartition(".")
        path = theirs[name].removesuffix(f".{leaf}")
        packing = choose(path, modules[module]) if leaf == "weight" else None
        if packing and (packing["bits"], packing["group_size"]) != (recipe.bits, recipe.group_size):
            packings[path] = packing
        yield _step(name, theirs[name], source.stored, recipe.dtype, packing, isinstance(modules[module], Norm))


def _step(
    name: str, written: str, stored: dict[str, Stored], dtype: mx.Dtype, packing: Packing | None, norm: bool
) -> Step:
    part = stored[name]
    raw = part.sources[0].provenance == "raw"
    exact = name.endswith(".A_log")
    scales = stored.get(f"{name}_scale_inv")
    return Step(written, part, mx.float32 if exact else dtype, packing, scales, shift=norm and raw)


def _vision_steps(path: Path, dtype: mx.Dtype) -> list[Step]:
    """The vision tensors as they are, named and laid out as mlx-vlm has them; mlx-lm skips them by that name."""
    steps = []
    for header in _vision_headers(path):
        for name, tensor in header.tensors.items():
            if not is_vision(name) or name.endswith("position_ids"):
                continue
            source = Source(header.path, name, "raw", None, None, tensor.shape, tensor.dtype, tensor.offset)
            part = Stored((source,), tensor.dtype, tensor.shape, tensor.nbytes)
            written = next((f"vision_tower.{name.removeprefix(p)}" for p in VISUAL if name.startswith(p)), name)
            kept = dtype if mx.issubdtype(tensor.dtype, mx.floating) else tensor.dtype
            steps.append(Step(written, part, kept, channels_last=len(tensor.shape) == 5))
    return steps


def _vision_headers(path: Path) -> list[Header]:
    if not (path / INDEX).exists():
        return read_shards(path)[0]
    return [read_header(path / file) for file in shards(path, is_vision)]


def _shards(steps: list[Step]) -> dict[str, list[Step]]:
    """Files of about 5 GB, cut and named as mlx-lm does."""
    shards = make_shards({step.name: step for step in steps})
    names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    return {name: list(shard.values()) for name, shard in zip(names, shards, strict=True)}


def _config(source: Layout, recipe: Recipe, packings: dict[str, Packing]) -> dict[str, Any]:
    config = deepcopy(source.config)
    config.pop("quantization_config", None)  # float8's, which is no more
    dtype = str(recipe.dtype).removeprefix("mlx.core.")
    for part in (config, models.text_config(config)):
        for field in ("dtype", "torch_dtype"):
            if field in part:
                part[field] = dtype
    if recipe.quantises:
        bits = recipe.bits or min(how["bits"] for how in packings.values())
        quantization = {"group_size": recipe.group_size, "bits": bits, "mode": "affine", **packings}
        config["quantization"] = config["quantization_config"] = quantization
    if source.mtp.available:
        declare_head(config, source.family, SIDECAR)
    return config


def _index(files: dict[str, list[Step]]) -> dict[str, Any]:
    """Of the shards alone: who reads all that it names must find the model that mlx-lm knows."""
    shards = {name: steps for name, steps in files.items() if "/" not in name}
    outputs = {output.name: (file, output) for file, steps in shards.items() for s in steps for output in s.outputs}
    return {
        "metadata": {"total_size": sum(output.nbytes for _, output in outputs.values())},
        "weight_map": {name: outputs[name][0] for name in sorted(outputs)},
    }


def _readme(plan: Conversion) -> str:
    try:
        card = ModelCard.load(plan.source.path / "README.md")
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError):  # the README need not be in order
        card = ModelCard.from_template(ModelCardData(), template_str="---\n{{ card_data }}\n---\n")
    card.data.library_name = "mlx"
    tags = card.data.tags if isinstance(card.data.tags, list) else []
    card.data.tags = sorted({*(tag for tag in tags if isinstance(tag, str)), "mlx"})
    if plan.original:  # else what the source says that it was made from stays
        card.data.base_model = plan.original
    head = f"Its MTP head is in `{SIDECAR}`." if plan.source.mtp.available else "The original has no MTP head."
    return (
        f"---\n{card.data.to_yaml()}\n---\n\n# {plan.destination.name}\n\n"
        f"{plan.original or plan.source.path.name}, converted to MLX by headstart {version('headstart')}. {head}\n"
    )


def _parameters(module: nn.Module) -> list[str]:
    flat: Any = tree_flatten(module.parameters())
    return [name for name, _ in flat]
