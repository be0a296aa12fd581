"""Read LoRA adapters as `mlx_lm.lora` writes them, check them against a model, and attach them to its layers."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..errors import AdapterError, check_type
from ..kernels.adapters import ADAPTERS, Adapter, LayerAdapters
from ..models import Model
from .config import read_object
from .read import open_file
from .safetensors import TensorInfo, read_header

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
LINEAR = (nn.Linear, nn.QuantizedLinear)
EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter on disk: its tensors by the name of the layer in mlx-lm's model."""

    name: str
    path: Path
    rank: int
    scale: float
    layers: dict[str, tuple[TensorInfo, TensorInfo]]  # lora_a and lora_b

    def layer_nbytes(self, layer: str, rank: int) -> int:
        """Return the bytes that its share of a layer takes in float32, if it is padded to a rank."""
        return sum(4 * prod(part.shape) // self.rank * rank for part in self.layers[layer])


def adapter_nbytes(adapters: Sequence[StoredAdapter]) -> int:
    """Return the bytes that adapters take in memory: those of a layer are padded to the largest rank."""
    ranks: dict[str, int] = {}
    for adapter in adapters:
        ranks |= {layer: max(adapter.rank, ranks.get(layer, 0)) for layer in adapter.layers}
    return sum(adapter.layer_nbytes(layer, ranks[layer]) for adapter in adapters for layer in adapter.layers)


def read_adapters(given: Mapping[str, str | Path], model: Model) -> list[StoredAdapter]:
    """Read the configs of adapters, by their names, and the headers of their files. Refuse what does not fit the
    model."""
    found = []
    for name, path in given.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise AdapterError(
                f"adapter {name!r}: a name begins with a letter or digit, and has these, dots, dashes or underscores"
            )
        check_type(path, (str, Path), f"adapter {name!r}", "give its folder")
        adapter = _read(name, Path(path).expanduser())
        _check(adapter, model)
        found.append(adapter)
    return found


def attach_adapters(model: Model, adapters: Sequence[StoredAdapter]) -> Model:
    """Read the weights of adapters into the model's layers. What is not checked here was by `read_adapters`."""
    modules = dict(model.lm.named_modules())
    for name in dict.fromkeys(name for adapter in adapters for name in adapter.layers):
        having = [adapter for adapter in adapters if name in adapter.layers]
        parts = [[open_file(part.file, {})[part.name] for part in adapter.layers[name]] for adapter in having]
        if not isinstance(modules[name], EXPERTS):
            parts = [[a.T[None], b.T[None]] for a, b in parts]
        rank = max(adapter.rank for adapter in having)
        down = [mx.pad(a.astype(mx.float32), [(0, 0), (0, rank - a.shape[1]), (0, 0)]) for a, _ in parts]
        scaled = [each.scale * b.astype(mx.float32) for each, (_, b) in zip(having, parts, strict=True)]
        up = [mx.pad(b.swapaxes(1, 2), [(0, 0), (0, rank - b.shape[2]), (0, 0)]) for b in scaled]
        slots = tuple(having.index(each) if each in having else -1 for each in adapters)
        ranks = tuple(each.rank for each in having)
        held = LayerAdapters(slots, mx.concatenate(down), mx.concatenate(up), ranks)
        mx.eval(held.down, held.up)
        modules[name][ADAPTERS] = held
    _check_applied(model, modules, adapters)
    known = {each.name: Adapter(n, _digest(each)) for n, each in enumerate(adapters)}
    return replace(model, adapters=known)


def _read(name: str, path: Path) -> StoredAdapter:
    if missing := next((file for file in (CONFIG, WEIGHTS) if not (path / file).is_file()), None):
        peft = (
            " It is PEFT's format, which must be converted first."
            if (path / "adapter_model.safetensors").exists()
            else ""
        )
        raise AdapterError(
            f"{path}: {missing} is missing. Name a folder that `mlx_lm.lora --adapter-path` has written.{peft}"
        )
    config = read_object(path / CONFIG, "Copy it from where the adapter was trained.")
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        raise AdapterError(f"{path / CONFIG}: fine_tune_type is {shortened(kind)}; only lora can be served unfused.")
    settings = config.get("lora_parameters")
    settings = settings if isinstance(settings, dict) else {}
    rank: Any = settings.get("rank")
    scale: Any = settings.get("scale")
    if type(rank) is not int or not 0 < rank <= 4096:
        raise AdapterError(f"{path / CONFIG}: lora_parameters.rank is {shortened(rank)}, not a positive number.")
    if type(scale) not in (int, float) or not isfinite(scale):
        raise AdapterError(f"{path / CONFIG}: lora_parameters.scale is {shortened(scale)}, not a number.")
    tensors = read_header(path / WEIGHTS).tensors
    layers: dict[str, tuple[TensorInfo, TensorInfo]] = {}
    for tensor in tensors:
        layer, _, leaf = tensor.rpartition(".")
        pair = [tensors.get(f"{layer}.{each}") for each in ("lora_a", "lora_b")]
        if leaf not in ("lora_a", "lora_b") or pair[0] is None or pair[1] is None:
            raise AdapterError(f"{path / WEIGHTS}: {tensor} is not one of a layer's lora_a and lora_b.")
        layers[layer] = (pair[0], pair[1])
    if not layers:
        raise AdapterError(f"{path / WEIGHTS}: holds no tensors.")
    return StoredAdapter(name, path, rank, float(scale), layers)


def _check(adapter: StoredAdapter, model: Model) -> None:
    """Refuse an adapter that was made for another model, or that changes what is not a linear layer of the trunk."""
    modules = dict(model.lm.named_modules())
    inside = {id(module) for layer in model.weights.layers for _, module in layer.named_modules()}
    file, rank = adapter.path / WEIGHTS, adapter.rank
    for name, (a, b) in adapter.layers.items():
        module = modules.get(name)
        if module is None:
            raise AdapterError(f"{file}: {name} is not in this model. The adapter was made for another one.")
        if id(module) not in inside or not isinstance(module, LINEAR + EXPERTS):
            raise AdapterError(
                f"{file}: changes {name}. Only linear layers and experts of the decoder layers can be adapted, "
                "neither embeddings nor the output layer. Train without these keys."
            )
        *experts, outputs, inputs = module.weight.shape
        if "scales" in module:
            inputs = inputs * 32 // module.bits
        right = (*experts, rank, inputs), (*experts, outputs, rank)
        if not experts:
            right = (inputs, rank), (rank, outputs)
        if (a.shape, b.shape) != right:
            raise AdapterError(
                f"{file}: {name} has shapes {a.shape} and {b.shape}, and this model with rank {rank} needs "
                f"{right[0]} and {right[1]}. The adapter was made for another model, or {CONFIG} has another rank."
            )
        if wrong := next((part for part in (a, b) if not mx.issubdtype(part.dtype, mx.floating)), None):
            raise AdapterError(f"{file}: {wrong.name} is of type {wrong.dtype}, not of floating-point numbers.")


def _check_applied(model: Model, modules: Mapping[str, nn.Module], adapters: Sequence[StoredAdapter]) -> None:
    """Refuse adapters of layers that our forward does not compute itself: describe a pass, and see which it adds."""
    applied = model.adapted_layers()
    for adapter in adapters:
        for name in adapter.layers:
            if id(modules[name][ADAPTERS]) not in applied:
                raise AdapterError(
                    f"{adapter.path / WEIGHTS}: changes {name}, which is not adapted in {model.family.name} models. "
                    "Train without this key."
                )


def _digest(adapter: StoredAdapter) -> str:
    with (adapter.path / WEIGHTS).open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()} {adapter.rank} {adapter.scale!r}"
