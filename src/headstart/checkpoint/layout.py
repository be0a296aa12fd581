"""What a model folder is, told from its config and the headers of its files alone."""

import copy
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import models
from ..cards import Card, Dispatch, dispatch
from ..errors import CheckpointError
from . import identity, provenance
from .config import REMEDY, read_config
from .headers import Header, read_header
from .index import INDEX, read_index
from .names import is_head, is_vision
from .parameters import Stored, gather, misfit, quantization_of, some
from .untrusted import describe

SIDECARS = ("mtp.safetensors", "model-mtp.safetensors", "mtp/weights.safetensors")
NORMS = "norms/weights.safetensors"  # of the trunk in float32, beside shards that round them: see docs/convert.md
# Why the head of a cached model could not be downloaded in this process, by the model's folder.
UNFETCHED: dict[Path, str] = {}
NUMBERED = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True)
class Mtp:
    """The multi-token-prediction head in the files. `location` without `available`: there, but unusable."""

    available: bool
    reason: str | None = None
    location: str | None = None
    num_layers: int = 0
    quantization: dict[str, Any] | None = None


@dataclass(frozen=True)
class Layout:
    path: Path
    family: str
    layout: provenance.Provenance  # of the trunk
    dtype: str
    quantization: dict[str, Any] | None
    parameters: int
    bytes: int
    mtp: Mtp
    config: dict[str, Any] = field(repr=False)
    stored: dict[str, Stored] = field(repr=False)  # by the model's names; the head's only if it is available
    quantized: dict[str, dict[str, Any]] = field(repr=False)  # module → bits, group_size, mode

    @cached_property
    def card(self) -> Card | None:
        return identity.card(self.path, self.family)

    def dispatch(self, mtp: bool | None = None) -> Dispatch:
        """Whether its head drafts, and how far; `mtp` is the user's word, None the environment's."""
        unusable = None if self.mtp.available else self.mtp.reason
        return dispatch(self.card, promised=models.head_modules(self.config), unusable=unusable, mtp=mtp)

    def report(self) -> dict[str, Any]:
        """The JSON of `headstart inspect`."""
        public = ("family", "layout", "dtype", "quantization", "parameters", "bytes")
        return {
            "path": str(self.path),
            **{name: getattr(self, name) for name in public},
            "native_mtp": asdict(self.mtp),
            "card": card.name if (card := self.card) else None,
        }


def read_layout(path: Path) -> Layout:
    """Recognise the model in the folder `path`, or raise a CheckpointError when its trunk is unusable."""
    config = read_config(path)
    weights = expected_weights(path, config)
    flat: Any = tree_flatten(weights.parameters())
    shapes = {name: array.shape for name, array in flat}
    modules = dict(weights.named_modules())

    headers, absent = read_shards(path)
    kinds = provenance.of_shards(headers)

    trunk = gather(headers, kinds, head=False)
    if (path / NORMS).is_file():
        exact = read_header(path / NORMS)
        norms = gather([exact], [provenance.of_sidecar(exact)], head=False)
        trunk |= {name: part for name, part in norms.items() if name in trunk}
    if problem := misfit(trunk, {k: v for k, v in shapes.items() if not is_head(k)}, modules):
        raise CheckpointError(f"{path}: {problem}. {_way_out(config)}")
    kind = trunk["embed_tokens.weight"].sources[0].provenance
    if kind is None:
        raise CheckpointError(f"{path}: nothing says whether its files are as released or converted.")

    if sidecar := find_sidecar(path, config):
        header = read_header(sidecar)
        head = gather([header], [provenance.of_sidecar(header)], head=True, bare=True)
    else:
        head = gather(headers, kinds, head=True)
    mtp = _describe_head(path, config, head, absent, {k: v for k, v in shapes.items() if is_head(k)}, modules)

    stored = {**trunk, **head} if mtp.available else trunk
    quantized = {name: q for name in modules if (q := quantization_of(name, modules[name], stored))}
    return Layout(
        path=path,
        family=models.FAMILIES[config["model_type"]].name,
        layout=kind,
        dtype=_dtype(trunk),
        quantization=_prevailing(trunk, modules),
        parameters=sum(prod(shape) for name, shape in shapes.items() if name in stored),
        bytes=sum(part.nbytes for part in {**trunk, **head}.values()),
        mtp=mtp,
        config=config,
        stored=stored,
        quantized=quantized,
    )


def expected_weights(path: Path, config: dict[str, Any]) -> nn.Module:
    """The model's modules with their head, not computed: the names and shapes that the files must have."""
    try:
        return models.build(copy.deepcopy(config)).weights
    except Exception as error:  # whatever mlx-lm trips over, nothing but the config can be its cause
        raise CheckpointError(
            f"{path / 'config.json'}: a field is missing or wrong ({describe(error)}). {REMEDY}"
        ) from error


def read_shards(path: Path) -> tuple[list[Header], dict[str, str]]:
    """The headers of the shards, checked against the index; and files of the head that are not as it says."""
    index = read_index(path)
    if index is None:
        return [read_header(file) for file in _numbered_shards(path)], {}
    names_of: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        names_of.setdefault(file, []).append(name)

    headers, absent = [], {}
    for file, names in sorted(names_of.items()):
        text = [name for name in names if not is_vision(name)]
        header = read_header(path / file) if text and (path / file).exists() else None
        if lacking := [name for name in text if not header or name not in header.tensors]:
            problem = f"lacks {some(lacking)}" if header else "is missing"
            if not all(is_head(name) for name in lacking):
                raise CheckpointError(f"{path / file}: {problem}, though {INDEX} names it. Download the file again.")
            absent[file] = problem
        if header:
            headers.append(header)
    return headers, absent


def _numbered_shards(path: Path) -> list[Path]:
    """Without an index: all files, and none missing between `-00001-of-N` and N."""
    files = {file.name for file in path.glob("*.safetensors")} - set(SIDECARS)
    for name in sorted(files):
        if match := NUMBERED.match(name):
            stem, _, count = match.groups()
            wanted = {f"{stem}-{n:05}-of-{count}.safetensors" for n in range(1, int(count) + 1)}
            if lacking := sorted(wanted - files):
                raise CheckpointError(f"{path / lacking[0]}: the file is missing. Download the model again.")
    if not files:
        raise CheckpointError(
            f"{path}: no safetensors file. Headstart reads Hugging Face releases and MLX conversions."
        )
    return [path / name for name in sorted(files)]


def sidecar_names(config: dict[str, Any]) -> list[str]:
    """Where a head may stand beside the shards. MTPLX and OptiQ name the place in config.json."""
    named = (config.get("mlx_lm_extra_tensors") or {}).get("mtp_file")
    return [str(named), *SIDECARS] if named else [*SIDECARS]


def find_sidecar(path: Path, config: dict[str, Any]) -> Path | None:
    """A head beside the shards; it goes before a head inside them."""
    return next((path / name for name in sidecar_names(config) if (path / name).is_file()), None)


def _describe_head(
    path: Path,
    config: dict[str, Any],
    head: dict[str, Stored],
    absent: dict[str, str],
    shapes: dict[str, tuple[int, ...]],
    modules: dict[str, nn.Module],
) -> Mtp:
    family = models.FAMILIES[config["model_type"]].name
    graft = f"`headstart graft {shlex.quote(str(path))} --from {identity.original(path, family) or 'ORIGINAL'}`"
    unfetched = f" It was not downloaded: {UNFETCHED[path]}" if path in UNFETCHED else ""
    if not head and absent:
        file, problem = next(iter(absent.items()))
        reason = f"{file}: {problem}, though {INDEX} places the MTP head in it.{unfetched} "
        return Mtp(False, f"{reason}Download the file, or {graft} writes a head.", location=", ".join(absent))
    if not head and models.head_modules(config):
        reason = f"config.json promises an MTP head but no file holds it.{unfetched}"
        return Mtp(False, f"{reason} {graft} brings it back.")
    if not head:
        return Mtp(
            False,
            "config.json promises no MTP head and no file holds one. "
            f"If the original has one, {graft} brings it over.",
        )

    files = {source.file: source.provenance for part in head.values() for source in part.sources}
    location = ", ".join(str(file.relative_to(path)) for file in sorted(files))
    count = len({name.split(".")[2] for name in head if name.startswith("mtp.layers.")})
    way_out = f"{graft} writes a new one, or load without the head"
    unusable: str | None = None
    if wrong := misfit(head, shapes, modules):
        unusable = f"{location}: the MTP head does not fit: {wrong}. {way_out}."
    elif None in files.values():
        unusable = (
            f"{location}: nothing in the file says whether it is as released or converted, and so whether "
            f"the norms of its MTP head are stored as w or as 1 + w. {way_out}."
        )
    return Mtp(unusable is None, unusable, location, count, _prevailing(head, modules))


def _prevailing(stored: dict[str, Stored], modules: dict[str, nn.Module]) -> dict[str, Any] | None:
    """The quantisation of most parameters among those that have one."""
    sizes: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for name in stored:
        module = name.removesuffix(".weight")
        if module in modules and (found := quantization_of(module, modules[module], stored)):
            sizes[tuple(found.items())] += prod(modules[module].weight.shape)
    return dict(sizes.most_common(1)[0][0]) if sizes else None


def _dtype(trunk: dict[str, Stored]) -> str:
    """The type that the model was saved in, whatever its matrices are packed to."""
    for name in ("embed_tokens.weight", "embed_tokens.scales", "norm.weight"):
        if name in trunk and mx.issubdtype(trunk[name].dtype, mx.floating):
            return str(trunk[name].dtype).removeprefix("mlx.core.")
    raise AssertionError("misfit() lets no norm pass that is not floating")


def _way_out(config: dict[str, Any]) -> str:
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "fp8"):
        return f"Headstart does not read {method!r} quantisation: take the original or an MLX conversion."
    return "Download the model again: config.json and the weights must come from one place."
