"""Drafters on disk: recognise one, check that it fits a model, and read it. Assistants are in `assistant.py`.

A block drafter, as released for DFlash and DFlash2, is a folder of its own with a config.json of a small Qwen3 and
the fields `block_size`, `mask_token_id`, `target_layer_ids` and `num_target_layers`, flat or under `dflash_config`.
It has no embedding and no output layer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .. import models
from ..errors import DrafterError, printable_error
from ..kernels.norms import Norm, use_float32_norms
from ..models.assistant import Assistant
from ..models.dflash import DFlash, DFlashSpec, DFlashWeights
from .assistant import check_assistant, expected_assistant, is_assistant, released_name
from .atomic import publish, require_space, staging_folder
from .config import MAX_LAYERS, REMEDY, read_config
from .names import ParameterPart
from .parameters import (
    Stored,
    StoredParameter,
    TensorSource,
    find_misfit,
    parameter_shapes,
    quantization_of,
    stored_bytes,
)
from .quantize import Recipe, choose_quantization
from .read import LazyFiles, read_parameter
from .safetensors import read_header, shard_files, write_safetensors

KEPT = ("fc", "pre_projection", "post_projection")  # between the drafter and its target: never quantised
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
KINDS = {"full_attention", "sliding_attention"}
MAX_BLOCK = 2**16
# What must be equal, by the model's name and the drafter's.
TARGET = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_hidden_layers": "num_target_layers"}


@dataclass(frozen=True)
class DrafterLayout:
    path: Path
    dtype: str
    quantization: dict[str, Any] | None
    parameters: int
    bytes: int
    config: dict[str, Any] = field(repr=False)
    drafter: DFlash | Assistant = field(repr=False)  # not computed yet
    stored: Stored = field(repr=False)

    def report(self) -> dict[str, Any]:
        """Return the JSON of `headstart inspect`."""
        public = ("dtype", "quantization", "parameters", "bytes")
        known = {"path": str(self.path), "family": self.drafter.kind}
        known |= {name: getattr(self, name) for name in public}
        if isinstance(self.drafter, Assistant):
            clusters, text = self.drafter.spec.clusters, self.config["text_config"]
            sizes = {"hidden_size": self.drafter.spec.target_hidden, "vocab_size": text["vocab_size"]}
            return {**known, "clusters": clusters and clusters[0], "scored_clusters": clusters and clusters[1],
                    "layers": text["num_hidden_layers"], "target": sizes}  # fmt: skip
        spec = self.drafter.spec
        return {
            **known,
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token,
            "target_layer_ids": list(spec.target_layers),
            "target": {name: _fields(self.config).get(field) for name, field in TARGET.items()},
        }


def is_drafter(path: Path) -> bool:
    """Return whether a folder holds a drafter instead of a model."""
    if not (path / "config.json").exists():
        return False
    config = read_config(path, drafter=True)
    return is_assistant(config) or "target_layer_ids" in _fields(config)


def read_drafter(path: Path) -> DrafterLayout:
    """Recognise the drafter in the folder `path` from its config and the headers of its files."""
    config = read_config(path)
    drafter = expected_assistant(path, config) if is_assistant(config) else _expected_drafter(path, config)
    stored = {}
    for file in shard_files(path, lambda name: True):
        for tensor in read_header(file).tensors.values():
            name = tensor.name.removeprefix("model.").replace("_codebook.weight", "_codebook")
            if name.startswith("masked_embedding.") and "masked_embedding" not in drafter.weights:
                continue  # 12B's assistant has clusters that config.json says are not used
            stored[name] = StoredParameter((TensorSource(tensor, "raw", ParameterPart(name)),), tensor.shape)
    if problem := find_misfit(stored, drafter.weights):
        remedy = "Download the drafter again: config.json and the weights must come from one place."
        raise DrafterError(f"{path}: {problem}. {remedy}")
    modules = dict(drafter.weights.named_modules())
    packed = {name: how for name in modules if (how := quantization_of(name, modules[name], stored))}
    nn.quantize(drafter.weights, class_predicate=_choose(packed))
    norm: Any = stored["norm.weight"]
    return DrafterLayout(
        path=path,
        dtype=str(norm.dtype).removeprefix("mlx.core."),
        quantization=next(iter(packed.values()), None),
        parameters=sum(prod(module.weight.shape) for module in modules.values() if "weight" in module),
        bytes=stored_bytes(stored),
        config=config,
        drafter=drafter,
        stored=stored,
    )


def check_drafter(layout: DrafterLayout, path: Path, config: dict[str, Any]) -> None:
    """Refuse a drafter that was made for another model than the one at `path`."""
    if isinstance(layout.drafter, Assistant):
        check_assistant(layout.path, layout.config, path, config)
        return
    ours, theirs = models.text_config(config), _fields(layout.config)
    if layout.drafter.spec.target_layers[-1] >= ours["num_hidden_layers"]:
        theirs.setdefault("num_target_layers", f"above {layout.drafter.spec.target_layers[-1]}")
    for name, field_ in TARGET.items():
        if theirs.get(field_, ours.get(name)) != ours.get(name):
            raise DrafterError(
                f"{layout.path}: a drafter for another model: its {field_} is {shortened(theirs.get(field_))}, "
                f"and the {name} of {path} is {ours.get(name)}. Name the drafter that was released for this model."
            )


def read_drafter_weights(layout: DrafterLayout, dtype: mx.Dtype) -> None:
    """Read the weights of a drafter into its modules; what is not quantised in type `dtype`, norms in float32."""
    weights, files = layout.drafter.weights, LazyFiles()
    norms = {f"{name}.weight" for name, module in weights.named_modules() if isinstance(module, Norm)}
    for name in parameter_shapes(weights):
        array = read_parameter(name, layout.stored, files, dtype, norm_offset=0.0 if name in norms else None)
        mx.eval(array)
        weights.update(tree_unflatten([(name, array)]))


def convert_drafter(layout: DrafterLayout, destination: Path, recipe: Recipe, *, dry_run: bool = False) -> int:
    """Write the drafter to a new folder, quantised as `recipe` says but for norms and what is in `KEPT`. Return its
    bytes."""
    if layout.quantization is not None:
        raise DrafterError(f"{layout.path}: quantised already. Name the original.")
    if destination.exists():
        raise DrafterError(f"{destination}: exists already. Name a new folder, or remove it first.")
    files, modules = LazyFiles(), dict(layout.drafter.weights.named_modules())
    how = recipe.common
    arrays: dict[str, mx.array] = {}
    for name in parameter_shapes(layout.drafter.weights):
        path, array = name.removesuffix(".weight"), read_parameter(name, layout.stored, files, recipe.dtype)
        module = modules.get(path)
        if how and path not in KEPT and module is not None and choose_quantization(path, module, lambda *_: how):
            parts = zip(("weight", "scales", "biases"), mx.quantize(array, **how), strict=False)
            arrays |= {f"{path}.{part}": values for part, values in parts}
        else:
            arrays[name] = array
    nbytes = sum(array.nbytes for array in arrays.values())
    if dry_run:
        return nbytes
    require_space(destination, nbytes)
    config = layout.config | ({"quantization": how} if how else {})
    if isinstance(layout.drafter, Assistant):
        config["model_type"] = config.pop("drafter")
        arrays = {released_name(name): array for name, array in arrays.items()}
    with staging_folder(destination.absolute()) as folder:
        write_safetensors(folder / "model.safetensors", arrays, lambda written: None)
        (folder / "config.json").write_text(json.dumps(config, indent=4))
        publish(folder, destination.absolute())
    return nbytes


def _choose(packed: dict[str, dict[str, Any]]) -> Callable[[str, nn.Module], dict[str, Any] | bool]:
    return lambda path, module: packed.get(path, False)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("dflash_config")
    return {**config, **(nested if isinstance(nested, dict) else {})}


def _expected_drafter(path: Path, config: dict[str, Any]) -> DFlash:
    """Return the drafter that config.json describes, not computed."""
    file = path / "config.json"
    if problem := _config_problem(_fields(config)):
        raise DrafterError(f"{file}: {problem}. Name a DFlash drafter, or download this one again.")
    try:
        spec = DFlashSpec.of(config)
        weights = DFlashWeights(config, spec)
    except Exception as error:  # whatever mlx-lm raises, only the config can be its cause
        raise DrafterError(f"{file}: a field is missing or wrong ({printable_error(error)}). {REMEDY}") from error
    use_float32_norms(weights)
    return DFlash(spec, weights)


def _config_problem(fields: dict[str, Any]) -> str | None:
    """Return what is wrong with the fields that are a drafter's own."""
    named, layers = fields.get("architectures") or [ARCHITECTURES[0]], fields.get("target_layer_ids")
    if layers is None:
        return "not a block drafter's: it has no target_layer_ids"
    if named not in ([each] for each in ARCHITECTURES):
        return f"architectures is {shortened(named)}, and Headstart runs {' and '.join(ARCHITECTURES)}"
    targets = fields.get("num_target_layers") or MAX_LAYERS
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        return f"target_layer_ids is {shortened(layers)}; it must be a list of layers"
    if sorted({*layers}) != layers or not 0 <= layers[0] <= layers[-1] < targets:
        return f"target_layer_ids is {shortened(layers)}; they must rise, from 0 to {targets - 1} at most"
    limits = {"block_size": (2, MAX_BLOCK), "mask_token_id": (0, int(fields.get("vocab_size") or 0) - 1)}
    if named == [ARCHITECTURES[1]]:
        hidden = int(fields.get("hidden_size") or 0)
        limits |= {"conv_kernel_size": (1, MAX_BLOCK), "conv_group_size": (1, hidden), "selector_rank": (1, hidden)}
        limits |= {"selector_top_k": (1, int(fields.get("vocab_size") or 0))}
    for name, (least, most) in limits.items():
        if type(value := fields.get(name)) is not int or not least <= value <= most:
            return f"{name} is {shortened(value)}; it must be a whole number from {least} to {most:,}"
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != fields.get("num_hidden_layers")
        or not {*map(str, kinds)} <= KINDS
    ):
        return f"layer_types is {shortened(kinds)}; it must name {' or '.join(sorted(KINDS))} for every layer"
    if "sliding_attention" in kinds and type(fields.get("sliding_window")) is not int:
        return f"sliding_window is {shortened(fields.get('sliding_window'))}, and some layers slide"
    return None
