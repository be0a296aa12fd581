"""From what a user calls a model to the folder it lies in, downloaded from the Hugging Face hub where needed."""

import json
import re
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

from .. import models
from ..errors import CheckpointError, HubError
from .headers import read_header
from .layout import INDEX, find_sidecar, read_config, sidecar_names
from .names import is_head, is_vision

BUILTIN = Path(__file__).parents[1] / "builtin"
DEFAULT = "tiny-qwen3.5"
HUB_ID = re.compile(r"^[\w-][\w.-]*/[\w-][\w.-]*$")
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer*", "README.md"]


def resolve(name: str | Path | None = None) -> Path:
    """The folder of a model: a path, a built-in model, a name in the Hugging Face cache, or a hub id.

    None is the built-in model. A hub id in the cache is not looked up again.
    """
    path = Path(name or BUILTIN / DEFAULT).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path}: a file. Name the folder of the model, {path.parent}.")
    name = str(name)
    if (BUILTIN / name).is_dir():
        return BUILTIN / name
    if repo := _cached_repo(name):
        return download(repo)
    if HUB_ID.match(name):
        return download(name)
    builtin = ", ".join(sorted(folder.name for folder in BUILTIN.iterdir() if folder.is_dir()))
    raise CheckpointError(
        f"{name}: no such folder, no model of that name in {constants.HF_HUB_CACHE}, and not a hub id "
        f"(org/name). Built in: {builtin}."
    )


def download(repo: str) -> Path:
    """The folder of a hub model in the cache, with what its text model and head need, and no more."""
    problem: Exception
    cached = _cached_snapshot(repo)
    if cached and not _lacks_head(cached):
        return cached
    try:
        # A cached model may lack only its head: mlx-lm does not download sidecars. Stay at its revision.
        revision = cached.name if cached else None
        siblings = HfApi().model_info(repo, revision=revision, timeout=10).siblings or []
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=SMALL_FILES))
        # Unknown families end here, before gigabytes of them are downloaded.
        weights = sidecar_names(read_config(folder)) + _shards(folder, head=False) + _shards(folder, head=True)
        wanted = sorted({file.rfilename for file in siblings} & set(weights))
        if not wanted:
            raise CheckpointError(
                f"{repo}: no safetensors file. Headstart reads Hugging Face releases and MLX conversions."
            )
        return Path(snapshot_download(repo, revision=folder.name, allow_patterns=wanted))
    except GatedRepoError as error:
        problem, way_out = error, "Accept its terms on the hub, then `hf auth login`."
    except RepositoryNotFoundError as error:
        problem, way_out = error, "Check the spelling; if it is private, `hf auth login`."
    except (HTTPError, OSError) as error:  # no network, a time-out, offline mode, a hub that is down
        if cached:
            return cached
        problem, way_out = error, "Check the network, or name a folder on this machine."
    cause = problem.__cause__ or problem
    cause_line = f"{type(cause).__name__}: {cause}".splitlines()[0].rstrip(" .:")
    raise HubError(f"{repo}: cannot be had from {constants.ENDPOINT} ({cause_line}). {way_out}") from problem


def _cached_repo(name: str) -> str | None:
    """org/name of the model `name` in the cache."""
    if "/" in name:
        return None
    folders = sorted(Path(constants.HF_HUB_CACHE).glob(f"models--*--{name}"))
    repos = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    if len(repos) > 1:
        raise CheckpointError(f"{name}: several models of that name are cached. Say {' or '.join(repos)}.")
    return repos[0] if repos else None


def _cached_snapshot(repo: str) -> Path | None:
    """The cached folder, if all of the model but perhaps its head is in it."""
    config = try_to_load_from_cache(repo, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if all((folder / file).exists() for file in _shards(folder, head=False)) else None


def _lacks_head(folder: Path) -> bool:
    """Is a head promised that has not been downloaded, and may be on the hub?"""
    config = read_config(folder)
    if not models.head_modules(config) or find_sidecar(folder, config):
        return False
    shards = [folder / file for file in _shards(folder, head=True)]
    if (folder / INDEX).exists():
        return not shards or not all(shard.exists() for shard in shards)
    return not any(is_head(name) for shard in shards for name in read_header(shard).tensors)


def _shards(folder: Path, *, head: bool) -> list[str]:
    """Files that hold tensors of the text model, or of its head, as the index has it."""
    index = folder / INDEX
    if not index.exists():
        return ["model.safetensors"]
    try:
        weight_map = json.loads(index.read_text())["weight_map"].items()
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of tensors ({error!r}). Delete it to try again.") from error
    return sorted({file for name, file in weight_map if is_head(name) == head and not is_vision(name)})
