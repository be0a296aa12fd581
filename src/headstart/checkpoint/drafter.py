"""Block drafters on disk, as released for DFlash: recognise one, check that it fits a model, and read it.

A drafter is a folder of its own with a config.json of a small Qwen3 and the fields `block_size`, `mask_token_id`,
`target_layer_ids` and `num_target_layers`, flat or under `dflash_config`. It has no embedding and no output layer.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .. import models
from ..errors import DrafterError
from ..models.base import Norm, use_float32_norms
from ..models.dflash import DFlash, DFlashSpec, DFlashWeights
from .config import MAX_LAYERS, printable_error, read_config
from .names import ParameterPart
from .parameters import Source, Stored, StoredParameter, find_misfit, parameter_shapes, quantization_of
from .read import LazyFiles, read_parameter
from .safetensors import read_header, shard_files

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DrafterLayout:
    path: Path
    dtype: str
    quantization: dict[str, Any] | None
    parameters: int
    bytes: int
    config: dict[str, Any] = field(repr=False)
    drafter: DFlash = field(repr=False)  # not computed yet
    stored: Stored = field(repr=False)

    def report(self) -> dict[str, Any]:
        """Return the JSON of `headstart inspect`."""
        spec, public = self.drafter.spec, ("dtype", "quantization", "parameters", "bytes")
        return {
            "path": str(self.path),
            "family": "dflash",
            **{name: getattr(self, name) for name in public},
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token,
            "target_layer_ids": list(spec.target_layers),
            "target": {name: _fields(self.config).get(field) for name, field in TARGET.items()},
        }


TARGET = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_hidden_layers": "num_target_layers"}


def is_drafter(path: Path) -> bool:
    """Return whether a folder holds a block drafter instead of a model."""
    return (path / "config.json").exists() and "target_layer_ids" in _fields(read_config(path, drafter=True))


def read_drafter(path: Path) -> DrafterLayout:
    """Recognise the drafter in the folder `path` from its config and the headers of its files."""
    config = read_config(path)
    drafter = _expected_drafter(path, config)
    tensors = [tensor for file in shard_files(path, lambda name: True) for tensor in read_header(file).tensors.values()]
    stored = {}
    for tensor in tensors:
        name = tensor.name.removeprefix("model.")
        stored[name] = StoredParameter((Source(tensor, "raw", ParameterPart(name)),), tensor.shape)
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
        bytes=sum(part.nbytes for part in stored.values()),
        config=config,
        drafter=drafter,
        stored=stored,
    )


def check_drafter(layout: DrafterLayout, path: Path, config: dict[str, Any]) -> None:
    """Refuse a drafter that was made for another model than the one at `path`."""
    ours, theirs = models.text_config(config), _fields(layout.config)
    if layout.drafter.spec.target_layers[-1] >= ours["num_hidden_layers"]:
        theirs.setdefault("num_target_layers", f"above {layout.drafter.spec.target_layers[-1]}")
    for name, field_ in TARGET.items():
        if theirs.get(field_, ours.get(name)) != ours.get(name):
            raise DrafterError(
                f"{layout.path}: a drafter for another model: its {field_} is {shortened(theirs.get(field_))} and the "
                f"{name} of {path} is {ours.get(name)}. Name the drafter that was released for this model."
            )


def read_drafter_weights(layout: DrafterLayout, dtype: mx.Dtype) -> None:
    """Read the weights of a drafter into its modules; what is not quantised in type `dtype`, norms in float32."""
    weights, files = layout.drafter.weights, LazyFiles()
    norms = {f"{name}.weight" for name, module in weights.named_modules() if isinstance(module, Norm)}
    for name in parameter_shapes(weights):
        array = read_parameter(name, layout.stored, files, dtype, norm_offset=0.0 if name in norms else None)
        mx.eval(array)
        weights.update(tree_unflatten([(name, array)]))


def _choose(packed: dict[str, dict[str, Any]]) -> Callable[[str, nn.Module], dict[str, Any] | bool]:
    return lambda path, module: packed.get(path, False)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("dflash_config")
    return {**config, **(nested if isinstance(nested, dict) else {})}


def _expected_drafter(path: Path, config: dict[str, Any]) -> DFlash:
    """Return the drafter that config.json describes, not computed."""
    fields, file = _fields(config), path / "config.json"
    if "target_layer_ids" not in fields:
        raise DrafterError(f"{path}: not a block drafter: config.json has no target_layer_ids. Name a DFlash drafter.")
    named = config.get("architectures") or [ARCHITECTURE]
    if named != [ARCHITECTURE]:
        raise DrafterError(f"{file}: architectures is {shortened(named)}; Headstart runs {ARCHITECTURE} only.")
    layers, targets = fields["target_layer_ids"], fields.get("num_target_layers", MAX_LAYERS)
    if type(targets) is not int or not _are_layers(layers, targets):
        wanted = "rising numbers of layers below num_target_layers"
        raise DrafterError(f"{file}: target_layer_ids is {shortened(layers)}; it must be {wanted} ({targets}).")
    limits = {"block_size": (2, 2**16), "mask_token_id": (0, int(fields.get("vocab_size") or 0) - 1)}
    for name, (least, most) in limits.items():
        if type(value := fields.get(name)) is not int or not least <= value <= most:
            raise DrafterError(f"{file}: {name} is {shortened(value)}; it must be a whole number, {least} to {most:,}.")
    kinds = config.get("layer_types") or ["full_attention"] * int(fields.get("num_hidden_layers") or 0)
    sliding = isinstance(kinds, list) and "sliding_attention" in kinds
    if not isinstance(kinds, list) or not {*map(str, kinds)} <= {"full_attention", "sliding_attention"}:
        raise DrafterError(f"{file}: layer_types is {shortened(kinds)}; layers are full_attention or sliding_attention.")
    if len(kinds) != fields.get("num_hidden_layers") or (sliding and type(config.get("sliding_window")) is not int):
        raise DrafterError(f"{file}: layer_types needs one entry per layer, and sliding ones a sliding_window.")
    try:
        spec = DFlashSpec.of({**deepcopy(config), "layer_types": kinds})
        weights = DFlashWeights(config, len(spec.target_layers))
    except Exception as error:  # whatever mlx-lm raises, only the config can be its cause
        raise DrafterError(f"{file}: a field is missing or wrong ({printable_error(error)}).") from error
    use_float32_norms(weights)
    return DFlash(spec, weights)


def _are_layers(layers: object, count: int) -> bool:
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        return False
    return sorted({*layers}) == layers and 0 <= layers[0] and layers[-1] < count

