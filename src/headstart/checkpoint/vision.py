"""Find and read the vision tower of a checkpoint, as released or as mlx-vlm and `convert` write it."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from .. import models
from ..errors import CheckpointError, printable_error
from ..images import ImageRules
from ..models.vision import VisionShape, VisionTower
from .config import read_object
from .names import is_vision, without_prefix
from .parameters import parameter_shapes
from .read import LazyFiles, open_file
from .safetensors import TensorInfo, read_header, shard_files

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
PATCHES = "patch_embed.proj.weight"


@dataclass(frozen=True)
class StoredTower:
    """The tower in the files. `reason`: why it cannot be used; None if it can."""

    reason: str | None
    tensors: dict[str, TensorInfo] = field(default_factory=dict, repr=False)  # by upstream's names

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
    if models.family_of(config).name not in ("qwen3_5", "qwen3_5_moe", "qwen4_exp"):
        return StoredTower("Headstart reads the vision towers of Qwen3.5, Qwen3.6 and Qwen3.8 only.")
    tensors = {}
    for file in shard_files(path, is_vision):
        if file.exists():
            for name, tensor in read_header(file).tensors.items():
                if is_vision(name) and not name.endswith("position_ids"):
                    tensors[without_prefix(name).partition(".")[2]] = tensor
    if not tensors:
        return StoredTower("config.json promises a vision tower, and no file here holds it. Download it again.")
    return StoredTower(_misfit(tensors, config), tensors)


def _misfit(tensors: dict[str, TensorInfo], config: dict[str, Any]) -> str | None:
    try:
        shape = VisionShape.of(config)
        expected = parameter_shapes(VisionTower(shape, ImageRules()))
    except Exception as error:  # whatever is raised, only the config can be its cause
        return f"config.json describes no vision tower ({printable_error(error)})."
    if any(name.endswith(".scales") for name in tensors):
        return "the vision tower is quantised, which Headstart does not read: convert the original."
    if missing := sorted(expected.keys() - tensors.keys()):
        return f"{len(missing)} tensors of the vision tower are missing ({missing[0]}, …). Download it again."
    for name, wanted in expected.items():
        kernels = _kernels(shape) if name == PATCHES else (wanted,)
        if tensors[name].shape not in kernels or not mx.issubdtype(tensors[name].dtype, mx.floating):
            found = list(tensors[name].shape)
            return f"{name} of the vision tower has shape {found} where config.json makes it {list(kernels[0])}."
    if shape.out != config["text_config"].get("hidden_size"):
        return f"the vision tower's outputs have {shape.out} numbers, and the model's embeddings do not."
    return None


def _kernels(shape: VisionShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the patch embedding, a convolution in files: as released and as in mlx-vlm."""
    sizes = (shape.frames, shape.patch, shape.patch)
    return (shape.hidden, shape.channels, *sizes), (shape.hidden, *sizes, shape.channels)


def empty_tower(path: Path, config: dict[str, Any], max_pixels: int) -> VisionTower:
    """Return the tower without its weights, for images of at most `max_pixels`."""
    found: dict[str, Any] = {}
    for name in PROCESSORS:
        if (path / name).exists():
            found = read_object(path / name)
            found = found.get("image_processor", found)
            break
    shape = VisionShape.of(config)
    try:
        rules = ImageRules.of(found, max_pixels)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / name}: a field is wrong ({printable_error(error)}). Download it again."
        ) from error
    if (rules.patch, rules.merge, rules.frames) != (shape.patch, shape.merge, shape.frames):
        raise CheckpointError(f"{path / name}: its patches are not those of config.json. Download both again.")
    return VisionTower(shape, rules)


def read_tower(tower: VisionTower, stored: StoredTower, dtype: mx.Dtype) -> None:
    """Read the weights, one at a time."""
    files = LazyFiles()
    for name in parameter_shapes(tower):
        tensor = stored.tensors[name]
        array = open_file(tensor.file, files).pop(tensor.name)
        if name == PATCHES:  # [O, T, H, W, I] → [O, I, T, H, W] → a matrix
            released = tensor.shape == _kernels(tower.shape)[0]
            array = (array if released else array.moveaxis(-1, 1)).reshape(array.shape[0], -1)
        array = mx.contiguous(array.astype(dtype))
        mx.eval(array)
        tower.update(tree_unflatten([(name, array)]))
        del array
        mx.clear_cache()
