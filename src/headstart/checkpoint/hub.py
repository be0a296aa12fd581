"""From what a user calls a model to the folder it lies in, downloaded from the Hugging Face hub where needed."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, HfFileSystem, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from .. import cards, models
from ..errors import CheckpointError, HubError
from .config import read_config
from .headers import read_header
from .identity import HUB_ID
from .index import INDEX, shards
from .layout import NORMS, UNFETCHED, find_sidecar, sidecar_names
from .names import is_head, is_vision
from .write import existing

LOG = logging.getLogger("headstart")
BUILTIN = Path(__file__).parents[1] / "builtin"
DEFAULT = "tiny-qwen3.5"
BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer*", "LICENSE*")  # the weights; a conversion has them too
SMALL_FILES = [*BESIDE, "README.md"]
BLOCK, LONGEST = 2**17, 2**28  # bytes of a header asked for at a time; and in all, should its length be nonsense


def resolve(name: str | Path | None = None) -> Path:
    """The folder of a model: a path, a built-in model, a name in the Hugging Face cache, or a hub id.

    None is the built-in model. A hub id in the cache is not looked up again.
    """
    found = locate(name)
    return found if isinstance(found, Path) else download(found)


def locate(name: str | Path | None = None) -> Path | str:
    """The folder that `name` stands for, or the id of a model on the hub."""
    try:
        path = Path(BUILTIN / DEFAULT if name is None else name).expanduser()
    except RuntimeError as error:  # ~somebody
        raise CheckpointError(f"{name}: no such folder ({error})") from error
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path}: a file. Name the folder of the model, {path.parent}.")
    name = str(name)
    if (BUILTIN / name).is_dir():
        return BUILTIN / name
    if repo := _cached_repo(name):
        return repo
    if HUB_ID.fullmatch(name):
        return name
    if (card := cards.find_card(name)) and card.hub_id:
        return card.hub_id
    builtin = ", ".join(sorted(folder.name for folder in BUILTIN.iterdir() if folder.is_dir()))
    raise CheckpointError(
        f"{name}: no such folder, no model of that name in {constants.HF_HUB_CACHE}, and not a hub id "
        f"(org/name). Built in: {builtin}."
    )


def download(repo: str, *, vision: bool = False) -> Path:
    """The folder of a hub model in the cache, with what its text model and head need, and no more.

    With `vision` also the tensors of its vision part.
    """
    cached = _cached_snapshot(repo, vision)
    if cached and not _lacks_head(cached):
        return cached
    try:
        with _named_errors(repo):
            # A cached model may lack only its head: mlx-lm does not download sidecars. Stay at its revision.
            folder, wanted = _wanted(repo, cached.name if cached else None, vision)
            _fetch(repo, folder, wanted)
            return folder
    except HubError as error:
        # The text is the same without the head, so a model that is here runs. A conversion would lose it for good.
        if cached is None or vision:
            raise
        UNFETCHED[cached] = str(error)
        LOG.warning("%s: runs without its MTP head, which could not be downloaded: %s", repo, error)
        return cached


def _fetch(repo: str, folder: Path, wanted: dict[str, int]) -> None:
    """Download files into the cached folder of a hub model, if the disk has room for them."""
    needed = sum(size for file, size in wanted.items() if not (folder / file).exists())
    begun = sum(file.stat().st_size for file in folder.parents[1].glob("blobs/*.incomplete"))
    if (missing := needed - begun) > shutil.disk_usage(folder).free:
        raise _disk_full(repo, f"{missing:,} bytes are still to be downloaded")
    try:
        snapshot_download(repo, revision=folder.name, allow_patterns=list(wanted))
    except (OSError, RuntimeError) as error:
        if _is_disk_full(error):
            raise _disk_full(repo, f"{needed:,} bytes were to be downloaded") from error
        raise


def missing_files(repo: str, *, vision: bool = False) -> list[str]:
    """The weights that `download` would have to fetch."""
    cached = _cached_snapshot(repo, vision)
    if cached and not _lacks_head(cached):
        return []
    with _named_errors(repo):
        folder, wanted = _wanted(repo, cached.name if cached else None, vision)
        return [file for file in wanted if not (folder / file).exists()]


@contextmanager
def outline(name: str | Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yield the folder of a model, to read headers from, and what to call it.

    A model on the hub is not downloaded for that: a temporary folder has its small files, and files that are headers
    and holes. It goes by its id.
    """
    repo = locate(name)
    if isinstance(repo, Path) or _cached_snapshot(repo, vision=False):
        folder = resolve(name)
        yield folder, str(folder)
        return
    with _temporary_folder() as temporary:
        place = Path(temporary, repo)
        place.mkdir(parents=True)
        with _named_errors(repo), ThreadPoolExecutor(8) as pool:
            folder, wanted = _wanted(repo, None, vision=False)
            for file in folder.iterdir():
                if file.is_file() and file.suffix != ".safetensors":  # through a folder the cache would be written to
                    (place / file.name).symlink_to(file.resolve())
            list(pool.map(lambda file: _copy_header(repo, folder.name, file, place / file), wanted))
        try:
            yield place, repo
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(place), repo)) from error


def _temporary_folder() -> "TemporaryDirectory[str]":
    try:
        return TemporaryDirectory()
    except OSError as error:
        raise HubError(f"no temporary directory can be written to ({error.strerror}). Set TMPDIR to one.") from error


def download_config(repo: str) -> tuple[Path, list[str]]:
    """The folder of a hub model with its small files alone, and the names of the files that hold its head."""
    if (cached := _cached_snapshot(repo, vision=False, text=False)) and not _lacks_head(cached):
        return cached, []
    with _named_errors(repo):
        folder, files = _small_files(repo, cached.name if cached else None)
        sidecars = sorted({*files} & set(sidecar_names(read_config(folder))))
        return folder, sidecars[:1] or sorted({*files} & set(shards(folder, is_head)))


def tokenizer_folder(name: str) -> Path:
    """Where a model's tokenizer lies. Of a hub model the small files alone are downloaded."""
    found = locate(name)
    if isinstance(found, Path):
        return found
    if isinstance(cached := try_to_load_from_cache(found, "tokenizer_config.json"), str):
        return Path(cached).parent
    with _named_errors(found):
        folder, _ = _small_files(found, None)
        return folder


def download_files(repo: str, folder: Path, files: list[str]) -> None:
    """Complete the cached folder of a hub model by these files."""
    if files:
        with _named_errors(repo):
            _fetch(repo, folder, {file: size for file, size in _sizes(repo, folder.name).items() if file in files})


def sizes(repo: str, files: list[str]) -> int:
    """The bytes of these files on the hub."""
    with _named_errors(repo):
        tree = HfApi().list_repo_tree(repo, recursive=True)
        return sum(entry.size for entry in tree if isinstance(entry, RepoFile) and entry.path in files)


def _wanted(repo: str, revision: str | None, vision: bool) -> tuple[Path, dict[str, int]]:
    """The folder with the small files, and the files that hold weights which are wanted with their sizes."""
    folder, files = _small_files(repo, revision)
    # Unknown families end here, before gigabytes of them are downloaded.
    places = {*sidecar_names(read_config(folder)), NORMS, *shards(folder, is_text), *shards(folder, is_head)}
    if vision:
        places |= {*shards(folder, is_vision)}
    if not places & {*files}:
        raise CheckpointError(
            f"{repo}: no safetensors file. Headstart reads Hugging Face releases and MLX conversions."
        )
    return folder, {file: files[file] for file in sorted(places & {*files})}


def _copy_header(repo: str, revision: str, file: str, target: Path) -> None:
    """A file as long as the hub's, of which only the header is there."""
    target.parent.mkdir(exist_ok=True)
    with HfFileSystem(endpoint=constants.ENDPOINT).open(f"{repo}@{revision}/{file}", block_size=BLOCK) as remote:
        length = remote.read(8)
        target.write_bytes(length + remote.read(min(int.from_bytes(length, "little"), LONGEST)))
        os.truncate(target, remote.size)


def _small_files(repo: str, revision: str | None) -> tuple[Path, dict[str, int]]:
    """Download what is no weights; also say which files the model has, and how large they are."""
    found = _sizes(repo, revision)
    return Path(snapshot_download(repo, revision=revision, allow_patterns=SMALL_FILES)), found


def _sizes(repo: str, revision: str | None) -> dict[str, int]:
    siblings = HfApi().model_info(repo, revision=revision, timeout=10, files_metadata=True).siblings or []
    return {file.rfilename: file.size or 0 for file in siblings}


@contextmanager
def _named_errors(repo: str) -> Iterator[None]:
    problem: Exception
    try:
        yield
        return
    except GatedRepoError as error:
        problem, way_out = error, "Accept its terms on the hub, then `hf auth login`."
    except RepositoryNotFoundError as error:
        problem, way_out = error, "Check the spelling; if it is private, `hf auth login`."
    except (HTTPError, OSError, RuntimeError) as error:  # no network, a time-out, offline mode, a hub that is down
        if _is_disk_full(error):
            raise _disk_full(repo, "its small files were to be downloaded") from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise HubError(
                f"{repo}: {constants.HF_HUB_CACHE} cannot be written to ({error.strerror}). Set HF_HUB_CACHE to a "
                "folder that can, or name a folder on this machine."
            ) from error
        problem, way_out = error, "Check the network, or name a folder on this machine."
    cause = problem.__cause__ or problem
    cause_line = f"{type(cause).__name__}: {cause}".splitlines()[0].rstrip(" .:")
    raise HubError(f"{repo}: cannot be had from {constants.ENDPOINT} ({cause_line}). {way_out}") from problem


def _is_disk_full(error: Exception) -> bool:
    """Also where hf_xet reports it, as a RuntimeError."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or "No space left on device" in str(error)


def _disk_full(repo: str, needed: str) -> HubError:
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(existing(cache)).free
    return HubError(
        f"{repo}: the disk is full: {needed}, and {cache} has {free:,} bytes free. Free some, or set HF_HUB_CACHE to "
        "a folder on another disk."
    )


def _cached_repo(name: str) -> str | None:
    """org/name of the model `name` in the cache."""
    if "/" in name:
        return None
    folders = sorted(Path(constants.HF_HUB_CACHE).glob(f"models--*--{name}"))
    repos = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    if len(repos) > 1:
        raise CheckpointError(f"{name}: several models of that name are cached. Say {' or '.join(repos)}.")
    return repos[0] if repos else None


def _cached_snapshot(repo: str, vision: bool, text: bool = True) -> Path | None:
    """The cached folder, if all of the model but perhaps its head is in it."""
    config = try_to_load_from_cache(repo, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    wanted = (shards(folder, is_text) if text else []) + (shards(folder, is_vision) if vision else [])
    return folder if all((folder / file).exists() for file in wanted) else None


def _lacks_head(folder: Path) -> bool:
    """Is a head promised that has not been downloaded, and may be on the hub?"""
    config = read_config(folder)
    if not models.head_modules(config) or find_sidecar(folder, config):
        return False
    files = [folder / file for file in shards(folder, is_head)]
    if (folder / INDEX).exists() or not all(file.exists() for file in files):
        return not files or not all(file.exists() for file in files)
    return not any(is_head(name) for file in files for name in read_header(file).tensors)


def is_text(name: str) -> bool:
    return not is_head(name) and not is_vision(name)
