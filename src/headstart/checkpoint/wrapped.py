"""Read models of families that are not ours: headers by us, weights by mlx-lm's own loader.

mlx-lm renames, stacks and repacks tensors family by family. It opens what `read_layout` has checked, and runs no code
that comes with a model.
"""

from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_mlx_lm_model

from .. import models
from ..errors import AdapterError, CheckpointError, DrafterError, HeadError, printable_error
from ..kernels import Backend
from ..models.wrapped import WrappedModel, tried, wrap
from .config import REMEDY
from .gguf_folder import linked_gguf
from .names import is_vision
from .safetensors import INDEX, Header, TensorInfo, read_header, read_index

PACKED = {"mxfp4": (4, 32), "mxfp8": (8, 32)}  # by `quant_method`: bits and group size


class Facts(NamedTuple):
    """What the headers of a model's files say."""

    layout: str
    dtype: str
    quantization: dict[str, Any] | None
    parameters: int
    bytes: int


def without_head(family: str) -> str:
    """Return why a model of a family that is not ours has no head."""
    return f"mlx-lm's own forward runs {family} models, and drafts are copied from the context at most."


def refuse_wrapped(path: Path, config: dict[str, Any], what: str, remedy: str) -> None:
    """Raise a CheckpointError if a model's family is not ours."""
    if not models.is_ours(config):
        raise CheckpointError(f"{path}: {what} for {config['model_type']} models, which mlx-lm runs. {remedy}")


def read_facts(path: Path, config: dict[str, Any]) -> Facts:
    """Return what the files in `path` hold, or raise a CheckpointError where they are damaged or missing."""
    if linked_gguf(path):
        raise CheckpointError(f"{path}: no GGUF of {config['model_type']} is read: take an MLX conversion.")
    headers = _headers(path)
    tensors = {name: t for header in headers for name, t in header.tensors.items() if not is_vision(name)}
    how = quantization_of_config(config)
    floats = [t for t in tensors.values() if mx.issubdtype(t.dtype, mx.floating)]
    sizes = Counter[mx.Dtype]()
    for tensor in floats:
        sizes[tensor.dtype] += tensor.nbytes
    dtype = max(sizes, key=lambda each: sizes[each], default=mx.bfloat16)
    converted = any(header.format == "mlx" for header in headers)
    return Facts(
        "converted" if converted else "raw",
        str(dtype).removeprefix("mlx.core."),
        how,
        sum(_numbers(tensor, tensors, config) for tensor in tensors.values()),
        sum(tensor.nbytes for tensor in tensors.values()),
    )


def quantization_of_config(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return what config.json says of most matrices."""
    said = config.get("quantization") or config.get("quantization_config")
    if not isinstance(said, dict):
        return None
    bits, group = PACKED.get(str(said.get("quant_method")), (said.get("bits"), said.get("group_size")))
    if type(bits) is not int or type(group) is not int:
        return None
    return {"bits": bits, "group_size": group, "mode": said.get("mode") or said.get("quant_method") or "affine"}


def _headers(path: Path) -> list[Header]:
    """Return the headers of the files that mlx-lm opens."""
    files = sorted(path.glob("model*.safetensors"))
    index = read_index(path)
    for tensor, name in index["weight_map"].items() if index is not None else ():
        if not is_vision(tensor) and not (path / name).exists():
            raise CheckpointError(f"{path / name}: is missing, though {INDEX} names it. Download the file again.")
    if not files:
        raise CheckpointError(f"{path}: no file model*.safetensors, which mlx-lm reads. {REMEDY}")
    return [read_header(file) for file in files]


def _numbers(tensor: TensorInfo, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> int:
    """Return how many of the model's numbers a tensor holds; scales and biases of groups are none."""
    name, count = tensor.name, prod(tensor.shape)
    module, _, leaf = name.rpartition(".")
    if leaf in ("scales", "biases") and f"{module}.weight" in tensors:
        return 0
    if name.endswith("_scales"):
        return 0
    if name.endswith("_blocks"):
        return 2 * count
    if leaf == "weight" and f"{module}.scales" in tensors and tensor.dtype == mx.uint32:
        said: Any = config.get("quantization") or {}
        own = said.get(module, said)
        bits = own.get("bits") if isinstance(own, dict) else None
        return count * 32 // (bits if type(bits) is int and bits > 0 else 4)
    return count


def read_wrapped(
    path: Path,
    config: dict[str, Any],
    backend: Backend,
    dtype: mx.Dtype,
    stored: str,
) -> WrappedModel:
    """Return mlx-lm's model of the folder `path`, its weights not read yet. `stored`: the type of its files."""
    try:
        lm, _ = load_mlx_lm_model(path, lazy=True)
        if dtype != getattr(mx, stored):
            _cast(lm, dtype)
        return wrap(lm, models.family_of(config), models.text_config(config), dtype, backend)
    except (Exception, SystemExit) as error:  # whatever mlx-lm raises; one of its modules ends the process
        raise CheckpointError(f"{path}: mlx-lm cannot load it ({printable_error(error)}). {REMEDY}") from error


def _cast(lm: nn.Module, dtype: mx.Dtype) -> None:
    keeps: Callable[[str], bool] = getattr(lm, "cast_predicate", lambda name: True)
    flat: Any = tree_flatten(lm.parameters())
    cast = [(name, a.astype(dtype)) for name, a in flat if mx.issubdtype(a.dtype, mx.floating) and keeps(name)]
    lm.load_weights(cast, strict=False)


def compute_wrapped(model: WrappedModel, progress: Callable[[float], None]) -> WrappedModel:
    """Read the weights, one after the other, and find out how the model can be run."""
    flat: Any = tree_flatten(model.lm.parameters())
    for number, (_, array) in enumerate(flat, 1):
        mx.eval(array)
        mx.clear_cache()
        progress(number / len(flat))
    return tried(model)


def refuse_for_wrapped(
    path: Path, family: str, *, head: bool, drafter: bool, adapters: bool, split: bool = False
) -> None:
    """Refuse by name what only our own families have."""
    wanted = ((head, HeadError, "a head"), (drafter, DrafterError, "a drafter"), (adapters, AdapterError, "adapters"))
    for given, error, what in wanted:
        if given:
            raise error(f"{path}: {what} cannot be used with {family} models, which mlx-lm runs: leave it out.")
    if split:
        raise CheckpointError(f"{path}: {family} models cannot be divided among several machines.")
