"""Recognise the model in a folder from its config and the headers of its files alone."""

import copy
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import yaml  # type: ignore[import-untyped]
from huggingface_hub import metadata_load

from .. import cards, models
from ..errors import CheckpointError, HeadstartError, printable_error
from .assistant import is_assistant
from .config import REMEDY, read_config
from .gguf import read_gguf
from .gguf_folder import linked_gguf
from .gguf_model import GGUF, gguf_header
from .head import CARD, SIDECARS, check_final_norm, check_sizes, find_sidecar, read_head
from .names import PARTS, Names, is_head, is_vision
from .parameters import (
    Stored,
    find_misfit,
    find_parameters,
    parameter_shapes,
    quantization_of,
    stored_bytes,
)
from .repack import METHODS, repacked
from .safetensors import INDEX, Header, read_header, read_index
from .tables import TABLES, StoredTable, find_tables
from .vision import find_tower
from .wrapped import read_facts, refuse_for_wrapped, without_head

NORMS = "norms/weights.safetensors"  # the trunk's in float32: 1 + w loses bits in the half precision of the shards
NO_WEIGHTS = "no safetensors file. Headstart reads Hugging Face releases and MLX conversions."
# Why the head of a cached model could not be downloaded in this process, by the model's folder.
HEAD_DOWNLOAD_ERRORS: dict[Path, str] = {}
# org/name as huggingface_hub accepts it, which otherwise raises a ValueError.
HUB_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)


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
    layout: str  # of the trunk: "raw", "converted" or "gguf"
    dtype: str
    quantization: dict[str, Any] | None
    parameters: int
    bytes: int
    mtp: Mtp
    config: dict[str, Any] = field(repr=False)
    stored: Stored = field(repr=False)  # by the model's names; the head's only if available
    quantized: dict[str, dict[str, Any]] = field(repr=False)  # module → bits, group_size, mode
    head_source: Path | None = None  # the folder that the head is from, if not the model's own
    tables: tuple[StoredTable, ...] = field(default=(), repr=False)  # of n-gram embeddings

    @property
    def head_folder(self) -> Path:
        return self.head_source or self.path

    @cached_property
    def head_card(self) -> cards.NativeMtp | None:
        """Return the card that lies beside the head."""
        file = self.head_folder / CARD
        return cards.read_head_card(file) if self.mtp.available and file.is_file() else None

    @cached_property
    def card(self) -> cards.Card | None:
        return _card(self.path, self.family)

    def dispatch(self, mtp: bool | None = None) -> cards.Dispatch:
        """Decide whether the head drafts, and how far. `mtp`: the user's choice; None leaves it to HEADSTART_MTP."""
        unusable = None if self.mtp.available else self.mtp.reason
        decision = cards.dispatch(
            self.card, own=self.head_card, promised=models.head_modules(self.config), unusable=unusable, mtp=mtp
        )
        return decision if models.is_ours(self.config) else replace(decision, reason=self.mtp.reason)

    def report(self) -> dict[str, Any]:
        """Return the JSON of `headstart inspect`."""
        public = ("family", "layout", "dtype", "quantization", "parameters", "bytes")
        return {
            "path": str(self.path),
            **{name: getattr(self, name) for name in public},
            "forward": "headstart" if models.is_ours(self.config) else "mlx-lm",
            "native_mtp": asdict(self.mtp) | (self.head_card.model_dump() if self.head_card else {}),
            "vision": find_tower(self.path, self.config).report(),
            "tables": {
                "count": len(self.tables),
                "parameters": sum(prod(part.shape) for table in self.tables for part in table.parts),
                "bytes": sum(table.nbytes for table in self.tables),
            },
            **{part: self._count(name) for part, name in PARTS.items()},
            "card": card.name if (card := self.card) else None,
            "known_drafter": card.drafter if card else None,
        }

    def _count(self, part: re.Pattern[str]) -> dict[str, int]:
        """Return how many layers have a part, and the bytes of its weights."""
        found = {name: stored for name, stored in self.stored.items() if part.search(name)}
        return {"layers": len({part.split(name)[0] for name in found} - {""}), "bytes": stored_bytes(found)}


def read_layout(path: Path, head_source: Path | None = None) -> Layout:
    """Recognise the model in the folder `path`, or raise a CheckpointError when its trunk is unusable.

    With `head_source` the head is the one in that folder, a checkpoint's or a drafter's.
    """
    config = read_config(path)
    if is_assistant(config):
        raise CheckpointError(f"{path}: an assistant of a Gemma 4: name that model, and this with --drafter.")
    if not models.is_ours(config):
        return _wrapped_layout(path, config, head_source)
    if head_source is not None:
        check_sizes(path, config, str(head_source), read_config(head_source, drafter=True))
        if not models.head_modules(config):
            models.text_config(config)[head_field(config)] = 1
    family = models.family_of(config).name
    model = expected_model(path, config)
    weights, names = model.weights, Names(config)
    headers, absent = _read_shards(path, names, config)

    trunk = _find_trunk(path, headers, names)
    if problem := find_misfit(trunk, weights):
        raise CheckpointError(f"{path}: {problem}. {_remedy(config)}")
    provenance = trunk["embed_tokens.weight"].sources[0].provenance
    if provenance is None:
        raise CheckpointError(f"{path}: nothing says whether its files are as released or converted.")

    beside = [read_header(path / TABLES)] if (path / TABLES).is_file() else []
    if head_source is not None:
        head = read_head(head_source)
    elif sidecar := find_sidecar(path, config):
        head = find_parameters(repacked([read_header(sidecar)], config), names, head=True, sidecar=True)
    else:
        head = find_parameters(headers, names, head=True)
    if head:
        model.share_missing(head)
    problem = find_misfit(head, weights, head=True) if head else None
    if head_source is not None and problem is None:
        check_final_norm(path, config, trunk, head_source)
    modules = dict(weights.named_modules())
    stored = {**trunk, **head} if head and problem is None else trunk
    quantized = {name: how for name in modules if (how := quantization_of(name, modules[name], stored))}
    if head:
        mtp = _describe_head(path, family, head, problem, quantized)
    else:
        mtp = _describe_missing_head(path, family, absent, bool(models.head_modules(config)))
    return Layout(
        path=path,
        family=family,
        layout=GGUF if headers[0].format == GGUF else provenance,
        dtype=_dtype(trunk, config),
        quantization=_most_common([how for name, how in quantized.items() if not is_head(name)]),
        parameters=sum(prod(shape) for name, shape in parameter_shapes(weights).items() if name in stored),
        bytes=stored_bytes({**trunk, **head}),
        mtp=mtp,
        config=config,
        stored=stored,
        quantized=quantized,
        head_source=head_source,
        tables=find_tables(path, [*headers, *beside], model.family.tables(model.lm)),
    )


def _find_trunk(path: Path, headers: list[Header], names: Names) -> Stored:
    """Return where the trunk's parameters are stored, of which norms may lie in a file of their own."""
    trunk = find_parameters(headers, names, head=False)
    if (path / NORMS).is_file():
        norms = find_parameters([read_header(path / NORMS)], names, head=False, sidecar=True)
        trunk |= {name: part for name, part in norms.items() if name in trunk}
    return trunk


def _wrapped_layout(path: Path, config: dict[str, Any], head_source: Path | None) -> Layout:
    """Return the layout of a model that mlx-lm runs: what its headers say, and no parameters by our names."""
    family, facts = models.family_of(config).name, read_facts(path, config)
    refuse_for_wrapped(path, family, head=head_source is not None, drafter=False, adapters=False)
    mtp = Mtp(False, without_head(family))
    return Layout(path, family, *facts, mtp=mtp, config=config, stored={}, quantized={})


def head_field(config: dict[str, Any]) -> str:
    """Return the field of config.json that promises a head."""
    family = models.family_of(config).name
    qwens = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
    return "mtp_num_hidden_layers" if family in qwens else "num_nextn_predict_layers"


def expected_model(path: Path, config: dict[str, Any]) -> models.Model:
    """Return the model with its head, not computed: the names and shapes that the files must have."""
    for name in ("vocab_size", "max_position_embeddings"):  # mlx-lm has defaults, which may not be this model's
        if models.text_config(config).get(name) is None:
            raise CheckpointError(f"{path / 'config.json'}: {name} is missing. {REMEDY}")
    try:
        return models.build(copy.deepcopy(config))
    except HeadstartError:  # also of a wrong HEADSTART_KERNELS, which is no fault of the file
        raise
    except Exception as error:  # whatever mlx-lm raises, only the config can be its cause
        raise CheckpointError(
            f"{path / 'config.json'}: a field is missing or wrong ({printable_error(error)}). {REMEDY}"
        ) from error


def _read_shards(path: Path, names: Names, config: dict[str, Any]) -> tuple[list[Header], dict[str, str]]:
    """Return the headers of the shards, checked against the index, and what is wrong with files of the head."""
    if gguf := linked_gguf(path):
        return [gguf_header(read_gguf(gguf), models.text_config(config))], {}
    index = read_index(path)
    if index is None:
        files = sorted(file for file in path.glob("*.safetensors") if file.name not in SIDECARS)
        if not files:
            raise CheckpointError(f"{path}: {NO_WEIGHTS}")
        return repacked([read_header(file) for file in files], config), {}
    names_of: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        if not is_vision(name):
            names_of.setdefault(file, []).append(name)
    headers, absent = [], {}
    for file, expected in sorted(names_of.items()):
        header = read_header(path / file) if (path / file).exists() else None
        if lacking := [name for name in expected if not header or name not in header.tensors]:
            problem = f"lacks {lacking[0]}" if header else "is missing"
            if not all(names.is_head(name) for name in lacking):
                raise CheckpointError(f"{path / file}: {problem}, though {INDEX} names it. Download the file again.")
            absent[file] = problem
        if header:
            headers.append(header)
    return repacked(headers, config), absent


def _graft_command(path: Path, family: str) -> str:
    return f"`headstart graft {shlex.quote(str(path))} --from {original_id(path, family) or 'ORIGINAL'}`"


def _describe_missing_head(path: Path, family: str, absent: dict[str, str], promised: bool) -> Mtp:
    graft = _graft_command(path, family)
    error = f" It was not downloaded: {HEAD_DOWNLOAD_ERRORS[path]}" if path in HEAD_DOWNLOAD_ERRORS else ""
    if absent:
        file, problem = next(iter(absent.items()))
        reason = f"{file}: {problem}, though {INDEX} places the MTP head in it.{error} "
        return Mtp(False, f"{reason}Download the file, or {graft} writes a head.", location=", ".join(absent))
    if promised:
        return Mtp(False, f"config.json promises an MTP head but no file holds it.{error} {graft} brings it back.")
    reason = "config.json promises no MTP head and no file holds one."
    return Mtp(False, f"{reason} If the original has one, {graft} brings it over.")


def _describe_head(path: Path, family: str, head: Stored, problem: str | None, quantized: dict[str, Any]) -> Mtp:
    files = {source.tensor.file for part in head.values() for source in part.sources}
    location = ", ".join(str(file.relative_to(path) if file.is_relative_to(path) else file) for file in sorted(files))
    count = len({name.split(".")[2] for name in head if name.startswith("mtp.layers.")})
    if problem:
        graft = _graft_command(path, family)
        problem = f"{location}: {problem}. {graft} writes a new MTP head, or load without the head."
    quantization = _most_common([how for name, how in quantized.items() if is_head(name)])
    return Mtp(problem is None, problem, location, count, quantization)


def _most_common(quantized: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the quantisation of most modules."""
    counts = Counter(tuple(how.items()) for how in quantized)
    return dict(counts.most_common(1)[0][0]) if counts else None


def _dtype(trunk: Stored, config: dict[str, Any]) -> str:
    """Return the type that the model was saved in, whatever its matrices are quantised to."""
    if trunk["embed_tokens.weight"].sources[0].tensor.make is not None:
        return str(models.text_config(config)["dtype"])
    names = [name for name in ("embed_tokens.weight", "embed_tokens.scales", "norm.weight") if name in trunk]
    dtype = next(trunk[name].dtype for name in names if mx.issubdtype(trunk[name].dtype, mx.floating))
    return str(dtype).removeprefix("mlx.core.")


def _remedy(config: dict[str, Any]) -> str:
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, *METHODS):
        return f"Headstart does not read {method!r} quantisation: take the original or an MLX conversion."
    return "Download the model again: config.json and the weights must come from one place."


# -- Which model it is: the files do not say, but their place, their README and the cards may.


def hub_id(path: Path) -> str | None:
    """Return org/name of a model in the Hugging Face cache."""
    snapshots = path.absolute().parent
    repo = snapshots.parent.name
    if snapshots.name != "snapshots" or not repo.startswith("models--"):
        return None
    return repo.removeprefix("models--").replace("--", "/", 1)


def readme_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata at the front of a model's README."""
    readme = path / "README.md"
    try:
        return (metadata_load(readme) or {}) if readme.is_file() else {}  # a pipe would block forever
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # a broken README is no error of ours
        return {}


def base_model_id(path: Path) -> str | None:
    """Return the id of the model that this one was made from, as its README says."""
    found = readme_metadata(path).get("base_model")
    first = found[0] if isinstance(found, list) and found else found
    # It is shown as part of a command: nothing that a shell or a terminal would act on.
    return first if isinstance(first, str) and HUB_ID.fullmatch(first) else None


def release_id(path: Path, family: str) -> str | None:
    """Return the id of a release: from the cache, or from the card with exactly the folder's name.

    A longer name may be a fine-tune's.
    """
    card = cards.find_card(path.absolute().name)
    return hub_id(path) or (card.hub_id if card and card.family == family else None)


def original_id(path: Path, family: str) -> str | None:
    """Return the id of the release that a conversion was made from."""
    if found := base_model_id(path):
        return found
    return card.original if (card := _card(path, family)) else None


def _card(path: Path, family: str) -> cards.Card | None:
    return cards.match_card((hub_id(path), base_model_id(path)), path.absolute().name, family)
