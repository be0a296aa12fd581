"""Which tensors of which files make up each parameter of the model, and whether they fit it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from .headers import Header
from .names import is_head, is_vision, pieces
from .provenance import Provenance

BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Source:
    """A tensor in a file, and which part of a parameter it is."""

    file: Path
    name: str
    provenance: Provenance | None
    expert: int | None
    half: int | None
    shape: tuple[int, ...]
    dtype: mx.Dtype
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class Stored:
    """A parameter as the files hold it, with the shape it has once its experts are stacked."""

    sources: tuple[Source, ...]
    dtype: mx.Dtype
    shape: tuple[int, ...]
    nbytes: int


def gather(
    headers: list[Header], kinds: list[Provenance | None], *, head: bool, bare: bool = False
) -> dict[str, Stored]:
    """The parameters of the trunk, or of the head, in these files. In a `bare` file all is the head's."""
    sources: dict[str, list[Source]] = {}
    dtypes: dict[str, mx.Dtype] = {}
    for header, kind in zip(headers, kinds, strict=True):
        without_prefix = bare and not any(is_head(name) for name in header.tensors)
        for name, tensor in header.tensors.items():
            if is_vision(name) or head != (without_prefix or is_head(name)):
                continue
            for piece in pieces(name):
                parameter = f"mtp.{piece.parameter}" if without_prefix else piece.parameter
                source = Source(
                    header.path, name, kind, piece.expert, piece.half, tensor.shape, tensor.dtype, tensor.offset
                )
                dtypes[parameter] = tensor.dtype
                sources.setdefault(parameter, []).append(source)
    return {name: _stored(name, parts, dtypes[name]) for name, parts in sources.items()}


def _stored(name: str, parts: list[Source], dtype: mx.Dtype) -> Stored:
    parts.sort(key=lambda part: part.expert or 0)
    shape = parts[0].shape
    if parts[0].half is not None and len(shape) > 1 and shape[-2] % 2 == 0:  # else it is left not to fit
        shape = (*shape[:-2], shape[-2] // 2, shape[-1])
    if parts[0].expert is not None:
        shape = (len(parts), *shape)
    if parts[0].provenance == "raw" and name.endswith("conv1d.weight") and len(shape) == 3:
        shape = (shape[0], shape[2], shape[1])  # [C, 1, K] → [C, K, 1]
    nbytes = dtype.size
    for n in shape:
        nbytes *= n
    return Stored(tuple(parts), dtype, shape, nbytes)


def quantization_of(name: str, module: nn.Module, stored: dict[str, Stored]) -> dict[str, Any] | None:
    """How the module's weight is packed, from its shapes: config.json can be wrong about single modules."""
    if f"{name}.scales" in stored:
        return infer_quant_config(name, module, stored)
    if f"{name}.weight_scale_inv" in stored:
        return {"group_size": 128, "bits": 8, "mode": "fp8"}
    return None


def misfit(
    stored: dict[str, Stored], shapes: dict[str, tuple[int, ...]], modules: dict[str, nn.Module]
) -> str | None:
    """Why these parameters are not the ones the model has, or None."""
    if missing := [name for name in shapes if name not in stored]:
        return f"{_count(missing, 'tensor')} missing ({some(missing)})"
    for name, part in stored.items():
        if problem := _torn(name, part):
            return problem
    unknown = []
    experts_first = sorted(stored.items(), key=lambda item: ".switch_mlp." not in item[0])
    for name, part in experts_first:
        module, _, leaf = name.rpartition(".")
        if name not in shapes:
            if not (leaf in ("scales", "biases", "weight_scale_inv") and f"{module}.weight" in shapes):
                unknown.append(name)
            continue
        wanted = shapes[name]
        try:
            packed = quantization_of(module, modules[module], stored) if leaf == "weight" else None
        except (ValueError, ZeroDivisionError, IndexError) as error:
            return f"the scales of {name} do not fit it ({error})"
        if packed and not hasattr(modules[module], "to_quantized"):
            return f"{name} has scales and cannot be quantised"
        found = _logical_shape(part, packed)
        if found != wanted:
            if ".switch_mlp." in name and found[1:] == wanted[1:]:
                return f"{name} has {found[0]} experts, config.json says {wanted[0]}"
            return f"{name} has shape {list(found)} where config.json makes it {list(wanted)}"
        if packed is None and not mx.issubdtype(part.dtype, mx.floating):
            return f"{name} is of type {part.dtype} and has no scales"
        if packed and not _scales_fit(module, wanted, packed, stored):
            return f"the scales of {name} do not fit it"
    unknown = [name for name in unknown if not _harmless(name, shapes)]
    return f"{_count(unknown, 'tensor')} unknown ({some(unknown)})" if unknown else None


def _torn(name: str, part: Stored) -> str | None:
    """Two tensors for one parameter, or experts with a gap."""
    if part.sources[0].expert is None:
        if len(part.sources) > 1:
            files = ", ".join(sorted({source.file.name for source in part.sources}))
            return f"{name} is stored twice ({files})"
        return None
    experts = [source.expert for source in part.sources]
    gaps = sorted(set(range(max(e or 0 for e in experts) + 1)) - set(experts))  # a name holds at most six digits
    if gaps:
        return f"{_count(gaps, 'expert')} of {name} missing ({some(gaps)})"
    if len(set(experts)) != len(experts):
        return f"an expert of {name} is stored twice"
    if len({source.shape for source in part.sources}) > 1:
        return f"the experts of {name} have different shapes"
    return None


def _logical_shape(part: Stored, packed: dict[str, Any] | None) -> tuple[int, ...]:
    if packed is None or packed["mode"] == "fp8" or packed["bits"] not in BITS:
        return part.shape
    return (*part.shape[:-1], part.shape[-1] * 32 // packed["bits"])


def _scales_fit(module: str, shape: tuple[int, ...], packed: dict[str, Any], stored: dict[str, Stored]) -> bool:
    if packed["mode"] == "fp8":
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        return stored[f"{module}.weight_scale_inv"].shape == blocks
    groups = (*shape[:-1], shape[-1] // packed["group_size"])
    biases = stored.get(f"{module}.biases")
    return stored[f"{module}.scales"].shape == groups and (
        biases is not None and biases.shape == groups if packed["mode"] == "affine" else biases is None
    )


def _harmless(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """A copy of the embedding in a model that ties it; rotary frequencies, which are computed."""
    tied = name.startswith("lm_head.") and "lm_head.weight" not in shapes
    return tied or name.endswith("rotary_emb.inv_freq")


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def some(items: list[Any]) -> str:
    return ", ".join(map(str, items[:3])) + (", …" if len(items) > 3 else "")
