"""Find and read the vision tower of a checkpoint, as released or as mlx-vlm and `convert` write it."""

import re
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from .. import models
from ..errors import CheckpointError, printable_error
from ..limits import MAX_IMAGE_PIXELS
from ..models.vision import TokenId, VisionTower
from .config import read_object
from .names import is_vision, without_prefix
from .parameters import parameter_shapes
from .read import LazyFiles, open_file
from .safetensors import TensorInfo, read_header, shard_files

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
Tower = VisionTower[Any]


@dataclass(frozen=True)
class StoredTower:
    """The tower in the files. `reason`: why it cannot be used; None if it can."""

    reason: str | None
    tensors: dict[str, TensorInfo] = field(default_factory=dict, repr=False)  # by the tower's names

    @property
    def available(self) -> bool:
        return self.reason is None

    def report(self) -> dict[str, Any]:
        """Return its part of the JSON of `headstart inspect`."""
        dtypes = sorted({str(tensor.dtype).removeprefix("mlx.core.") for tensor in self.tensors.values()})
        return {
            "available": self.available,
            "reason": self.reason,
            "parameters": sum(prod(tensor.shape) for tensor in self.tensors.values()),
            "bytes": sum(tensor.nbytes for tensor in self.tensors.values()),
            "dtype": ", ".join(dtypes) or None,
        }


def find_tower(path: Path, config: dict[str, Any]) -> StoredTower:
    """Return the tower of the model in the folder `path`, from config.json and headers alone."""
    if not isinstance(config.get("vision_config"), dict):
        return StoredTower("config.json has no vision_config: this model reads text only.")
    if models.family_of(config).vision is None:
        return StoredTower("Headstart reads the vision towers of Qwen3.5 to 3.8, Gemma 4 and Step-3.7 only.")
    try:
        tower = _make_tower(path, config, {}, MAX_IMAGE_PIXELS)
        expected, kernels = parameter_shapes(tower), tower.kernels
    except Exception as error:  # whatever is raised, only the config can be its cause
        return StoredTower(f"config.json describes no vision tower ({printable_error(error)}).")
    parts, tensors = {name.partition(".")[0] for name in expected}, {}
    for file in shard_files(path, is_vision):
        if file.exists():
            for stored, tensor in read_header(file).tensors.items():
                name = _canonical(stored, tower)
                if is_vision(stored) and name.partition(".")[0] in parts and not name.endswith("position_ids"):
                    tensors[name] = tensor
    if not tensors:
        return StoredTower("config.json promises a vision tower, and no file here holds it. Download it again.")
    problem = _misfit(tensors, expected, kernels)
    if problem is None and tower.spec.out != config["text_config"].get("hidden_size"):
        problem = f"the vision tower's outputs have {tower.spec.out} numbers, and the model's embeddings do not."
    return StoredTower(problem, tensors)


def _make_tower(path: Path, config: dict[str, Any], processor: dict[str, Any], max_pixels: int) -> Tower:
    vision = models.family_of(config).vision
    assert vision is not None
    return vision.tower(config, vision.rules.of(processor, max_pixels), _token_ids(path))


def _canonical(name: str, tower: Tower) -> str:
    """Return the tower's name for a tensor."""
    name = without_prefix(name)
    for pattern, ours in tower.renamed:
        name = re.sub(pattern, ours, name)
    return name


def _misfit(
    tensors: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]], kernels: dict[str, tuple[int, ...]]
) -> str | None:
    if any(name.endswith(".scales") for name in tensors):
        return "the vision tower is quantised, which Headstart does not read: convert the original."
    if missing := sorted(expected.keys() - tensors.keys()):
        return f"{len(missing)} tensors of the vision tower are missing ({missing[0]}, …). Download it again."
    for name, wanted in expected.items():
        shapes = _layouts(kernels[name]) if name in kernels else (wanted,)
        if tensors[name].shape not in shapes or not mx.issubdtype(tensors[name].dtype, mx.floating):
            found = list(tensors[name].shape)
            return f"{name} of the vision tower has shape {found} where config.json makes it {list(shapes[0])}."
    return None


def _layouts(kernel: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes that a convolution's kernel [O, I, …] has in files: as released and as in mlx-vlm."""
    outputs, inputs, *sizes = kernel
    return kernel, (outputs, *sizes, inputs)


def _token_ids(path: Path) -> TokenId:
    """Return what finds the ids of special tokens in tokenizer.json, which is read when the first is asked for."""

    @cache
    def known() -> dict[str, int]:
        added = read_object(path / "tokenizer.json").get("added_tokens") or []
        return {each["content"]: int(each["id"]) for each in added}

    def token_id(text: str) -> int:
        try:
            return known()[text]
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{path / 'tokenizer.json'} has no token {text}, which images need. Download it again."
            ) from error

    return token_id


def empty_tower(path: Path, config: dict[str, Any], max_pixels: int) -> Tower:
    """Return the tower without its weights, for images of at most `max_pixels`."""
    found: dict[str, Any] = {}
    for name in PROCESSORS:
        if (path / name).exists():
            found = read_object(path / name)
            found = found.get("image_processor", found)
            break
    try:
        tower = _make_tower(path, config, found, max_pixels)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / name}: a field is wrong ({printable_error(error)}). Download it again."
        ) from error
    if not tower.fits:
        raise CheckpointError(f"{path / name}: its patches are not those of config.json. Download both again.")
    return tower


def read_tower(tower: Tower, stored: StoredTower, dtype: mx.Dtype) -> None:
    """Read the weights, one at a time."""
    files = LazyFiles()
    for name, shape in parameter_shapes(tower).items():
        tensor = stored.tensors[name]
        array = open_file(tensor.file, files).pop(tensor.name)
        if (kernel := tower.kernels.get(name)) is not None:
            array = array if tensor.shape == kernel else array.moveaxis(-1, 1)  # [O, I, …]
            array = array.reshape(shape) if len(shape) == 2 else array.moveaxis(1, -1)
        array = mx.contiguous(array.astype(dtype))
        mx.eval(array)
        tower.update(tree_unflatten([(name, array)]))
        del array
        mx.clear_cache()
