"""Find which tensors of which files make up each parameter of the model, and whether they fit it.

A file is raw (as released) or converted to MLX, which decides whether its norms are stored as w or as 1 + w. The
values cannot tell: the mean of a converted `pre_fc_norm_embedding` is 0.27 and looks raw (omlx#3742). Where the
file's origin is unknown nothing is guessed.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from .config import read_object
from .names import Names, ParameterPart, is_head, is_table, is_vision
from .safetensors import Header, TensorInfo

Provenance = Literal["raw", "converted"]

BITS = (1, 2, 3, 4, 5, 6, 8)
WHOLE = ("token_ordering", ".tid2eid")  # tables of whole numbers
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class TensorSource:
    """A tensor in a file, and which part of a parameter it is."""

    tensor: TensorInfo
    provenance: Provenance | None
    part: ParameterPart


@dataclass(frozen=True)
class StoredParameter:
    """A parameter as the files hold it, with the shape it has once its experts are stacked."""

    sources: tuple[TensorSource, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> mx.Dtype:
        return self.sources[0].tensor.dtype

    @property
    def raw(self) -> bool:
        return self.sources[0].provenance == "raw"


Stored = dict[str, StoredParameter]  # by the model's names


def stored_bytes(stored: Stored) -> int:
    """Return the bytes of the files' tensors; one of which several parameters are made counts once."""
    tensors = [source.tensor for part in stored.values() for source in part.sources]
    parts = {(part.file, part.start): part.nbytes for tensor in tensors for part in tensor.parts or (tensor,)}
    return sum(parts.values())


def parameter_shapes(weights: nn.Module) -> dict[str, tuple[int, ...]]:
    flat: Any = tree_flatten(weights.parameters())
    return {name: array.shape for name, array in flat}


def compute_constants(weights: nn.Module) -> None:
    """Compute what modules hold beside their parameters, as frequencies: no other thread could."""
    held = [item for module in weights.modules() for item in module.items()]
    mx.eval([value for name, value in held if name.startswith("_") and isinstance(value, mx.array)])


def find_parameters(headers: list[Header], names: Names, *, head: bool, sidecar: bool = False) -> Stored:
    """Return the parameters of the trunk, or of the head, in these files.

    A `sidecar` is a file beside the shards. If none of its names has the prefix `mtp.`, all are the head's.
    """
    sources: dict[str, list[TensorSource]] = {}
    # A file's conv1d tells its provenance, or the conv1d of another file that was saved in the same format.
    by_format = {header.format: found for header in headers if (found := _provenance_of_conv1d(header))}
    for header in headers:
        provenance = (
            header.provenance
            or _provenance_of_conv1d(header)
            or by_format.get(header.format)
            or _provenance_of_names(header)
        )
        if sidecar and _manifest_says_converted(header):
            provenance = "converted"
        if provenance is None and not names.norm_offset:  # nothing depends on it
            provenance = "raw"
        unprefixed = head and sidecar and not any(names.is_head(name) for name in header.tensors)
        for name, tensor in header.tensors.items():
            if is_vision(name) or is_table(name) or head != (unprefixed or names.is_head(name)):
                continue
            for part in names.parts(name):
                parameter = f"mtp.{part.parameter}" if unprefixed else part.parameter
                sources.setdefault(parameter, []).append(TensorSource(tensor, provenance, part))
    return {name: _stored_parameter(name, parts) for name, parts in sources.items()}


def _stored_parameter(name: str, sources: list[TensorSource]) -> StoredParameter:
    sources.sort(key=lambda source: source.part.expert or 0)
    first, part = sources[0], sources[0].part
    shape = first.tensor.shape
    if part.heads is not None:
        heads, key, value = part.heads
        if name.endswith(".weight") and len(shape) == 2 and shape[0] == heads * (key + value):
            shape = (heads, shape[1], key) if part.half == 0 else (heads, value, shape[1])
    elif part.half is not None and len(shape) > 1 and shape[-2] % 2 == 0:  # an odd one will not fit the model
        shape = (*shape[:-2], shape[-2] // 2, shape[-1])
    if part.expert is not None:
        shape = (len(sources), *shape)
    if part.groups is not None and len(shape) == 2 and shape[0] % part.groups == 0:
        shape = (part.groups, shape[0] // part.groups, shape[1])
    if first.provenance == "raw" and name.endswith("conv1d.weight") and len(shape) == 3:
        shape = (shape[0], shape[2], shape[1])  # [C, 1, K] → [C, K, 1]
    return StoredParameter(tuple(sources), shape)


def _manifest_says_converted(header: Header) -> bool:
    """Return whether the manifest that vllm-mlx writes beside a head says that its norms are 1 + w."""
    manifest = header.path.with_name("manifest.json")
    return manifest.exists() and read_object(manifest).get("rmsnorm_weight_format") == "mlx_gamma"


def _provenance_of_conv1d(header: Header) -> Provenance | None:
    """Tell by the shape: [C, 1, K] as released, [C, K, 1] converted."""
    for name, tensor in header.tensors.items():
        if name.endswith("conv1d.weight"):
            return "converted" if tensor.shape[-1:] == (1,) else "raw"
    return None


def _provenance_of_names(header: Header) -> Provenance | None:
    """Tell by the metadata and the tensors' names, where they agree."""
    names = "\n".join(header.tensors)
    packed = ".scales\n" in names + "\n"
    found: set[Provenance] = set()
    if header.format == "mlx" or packed or ".switch_mlp." in names or "language_model.mtp." in names:
        found.add("converted")
    if header.format == "pt" or re.search(r"\.mlp\.experts\.\d+\.", names) or "_scale_inv" in names:
        found.add("raw")
    # vllm-mlx shifts the norms of Qwen3.6 heads and leaves the experts fused.
    if re.search(r"\.mlp\.experts\.(gate_up|down)_proj", names) and not packed and not header.written_by_mlx:
        found.add("raw")
    return found.pop() if len(found) == 1 else None


def quantization_of(name: str, module: nn.Module, stored: Stored) -> dict[str, Any] | None:
    """Return how the module's weight is quantised, by its shapes: config.json can be wrong about single modules."""
    if f"{name}.scales" in stored:
        return infer_quant_config(name, module, stored)
    weight = stored.get(f"{name}.weight")
    return weight.sources[0].tensor.quantized if weight is not None else None


def find_misfit(stored: Stored, weights: nn.Module, *, head: bool = False) -> str | None:
    """Return why these parameters are not those of the model's trunk, or of its head; None if they are."""
    expected = {name: shape for name, shape in parameter_shapes(weights).items() if is_head(name) == head}
    for path, module in weights.named_modules():
        weight = f"{path}.weight"
        if weight in expected and f"{path}.scales" in stored and weight in stored:
            try:
                how = quantization_of(path, module, stored)
                expected |= _quantised_shapes(path, module, stored, how)
            except (ValueError, ZeroDivisionError, IndexError) as error:
                return f"the scales of {weight} do not fit it ({error})"
    if missing := [name for name in expected if name not in stored]:
        return f"{_count(missing, 'tensor')} missing ({_first_few(missing)})"
    for name, part in stored.items():
        if problem := _misfit_of_sources(name, part):
            return problem
    for name in sorted(expected, key=lambda name: (".switch_mlp." not in name, name)):  # experts first
        found, wanted = stored[name].shape, expected[name]
        if found != wanted and ".switch_mlp." in name and found[1:] == wanted[1:]:
            return f"{name} has {found[0]} experts, config.json says {wanted[0]}"
        if found != wanted:
            return f"{name} has shape {list(found)} where config.json makes it {list(wanted)}"
        whole = name.endswith(WHOLE) or f"{name.rpartition('.')[0]}.scales" in expected
        if not whole and not mx.issubdtype(stored[name].dtype, mx.floating):
            return f"{name} is of type {stored[name].dtype} and has no scales"
    unknown = [name for name in stored if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if "lm_head.weight" not in expected:  # a model that ties its embedding may hold a copy of it
        unknown = [name for name in unknown if not name.startswith("lm_head.")]
    if unknown:
        return f"{_count(unknown, 'tensor')} unknown ({_first_few(unknown)})"
    if head and any(source.provenance is None for part in stored.values() for source in part.sources):
        return "nothing in the file says whether it is as released, with norms stored as w, or converted, as 1 + w"
    return None


def _misfit_of_sources(name: str, part: StoredParameter) -> str | None:
    experts = {source.part.expert for source in part.sources}
    if len(experts) < len(part.sources) or (None in experts and len(experts) > 1):
        files = ", ".join(sorted({source.tensor.file.name for source in part.sources}))
        return f"{name} is stored twice ({files})"
    if None in experts:
        return None
    gaps = sorted(set(range(max(e or 0 for e in experts) + 1)) - experts)  # a name holds at most six digits
    if gaps:
        return f"{_count(gaps, 'expert')} of {name} missing ({_first_few(gaps)})"
    if len({(source.tensor.shape, source.tensor.dtype) for source in part.sources}) > 1:
        return f"the experts of {name} have different shapes or types"
    return None


def _quantised_shapes(
    path: str, module: nn.Module, stored: Stored, how: dict[str, Any] | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a module's parameters have once its weight is quantised as in the files, see
    `quantization_of`.

    mlx is not asked: it ends the process where a group is empty.
    """
    if how is None or not hasattr(module, "to_quantized") or how["bits"] not in BITS:
        raise ValueError("it cannot be quantised so")
    *rows, columns = module.weight.shape
    groups = (*rows, columns // how["group_size"])
    shapes = {f"{path}.weight": (*rows, columns * how["bits"] // 32), f"{path}.scales": groups}
    if how["mode"] == "affine":
        if how["group_size"] not in GROUP_SIZES:
            raise ValueError(f"groups of {how['group_size']}")
        shapes[f"{path}.biases"] = groups
    if how["mode"] == "nvfp4" and f"{path}.global_scale" in stored:
        shapes[f"{path}.global_scale"] = tuple(rows[:-1])
    return shapes


def _count(items: list[Any], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def _first_few(items: list[Any]) -> str:
    return ", ".join(map(str, items[:3])) + (", …" if len(items) > 3 else "")
