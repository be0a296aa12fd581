"""From the name of a model to its folder, downloaded from the Hugging Face hub where needed."""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, HfFileSystem, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

from .. import cards, models
from ..errors import CheckpointError, HubError
from .atomic import DISK_FULL, NOT_WRITABLE, free_space
from .config import read_config
from .gguf_folder import gguf_folder, gguf_in
from .head import find_sidecar, sidecar_names
from .layout import HEAD_DOWNLOAD_ERRORS, HUB_ID, NO_WEIGHTS, NORMS
from .names import Names, is_vision
from .safetensors import INDEX, read_header, shard_names
from .tables import TABLES

LOG = logging.getLogger("headstart")
BUILTIN = Path(__file__).parents[1] / "builtin"
DEFAULT = "tiny-qwen3.5"
COMPANION_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer*", "LICENSE*")  # beside the weights, kept by `convert`
SMALL_FILES = [*COMPANION_FILES, "README.md"]
BLOCK = 2**17  # bytes of a header requested at a time
HUB_ADDRESS = re.compile(r"^(?:https://)?(?:huggingface\.co|hf\.co)/")  # before a hub id, as people copy it
MAX_HEADER = 2**28  # bytes, should the length in the file be nonsense

Announce = Callable[[dict[str, int]], None]


def resolve(name: str | Path | None = None, *, vision: bool = False) -> Path:
    """Return the folder of a model, downloaded if it is not on this machine.

    Args:
        name: A path, a built-in model, a name in the Hugging Face cache, or a hub id. None: the built-in model. A
            hub id in the cache is not looked up again.
        vision: With the tensors of its vision part.
    """
    found = locate(name)
    return found if isinstance(found, Path) else download(found, vision=vision)


def resolve_head(name: str | Path) -> Path:
    """Return the folder of a model or a drafter of which the head is wanted, downloaded if it is on the hub."""
    found = locate(name)
    if isinstance(found, Path):
        return found
    folder, files = missing_files(found, text=False)
    download_files(found, folder, files)
    return folder


def locate(name: str | Path | None = None) -> Path | str:
    """Return the folder that `name` stands for, or the id of a model on the hub."""
    if name == "":
        raise CheckpointError(
            "the model's name is empty: give a folder, a hub id, or no name for the built-in model."
        )
    try:
        path = Path(BUILTIN / DEFAULT if name is None else name).expanduser()
    except RuntimeError as error:  # ~somebody
        raise CheckpointError(f"{name}: no such folder ({error})") from error
    exists = os.path.exists(path)  # also says no of a name that is too long for the file system
    if exists and (file := gguf_in(path)):
        return gguf_folder(file)
    if os.path.isdir(path):
        return path
    if exists:
        raise CheckpointError(f"{path}: a file. Name the folder of the model, {path.parent}.")
    name = HUB_ADDRESS.sub("", str(name))
    if os.path.isdir(BUILTIN / name):
        return BUILTIN / name
    if repo := _cached_repo(name):
        return repo
    if HUB_ID.fullmatch(name):
        return name
    if (card := cards.find_card(name)) and card.hub_id:
        return card.hub_id
    builtin = ", ".join(folder.name for folder in builtin_models())
    raise CheckpointError(
        f"{name}: no such folder, no model of that name in {constants.HF_HUB_CACHE}, and not a hub id "
        f"(org/name). Built in: {builtin}. `headstart recommend` lists models to download."
    )


def download(repo: str, *, vision: bool = False, announce: Announce = lambda files: None) -> Path:
    """Download the text model and the head of a hub model, and its `vision` part. Return the cached folder.

    `announce` is called with the files that will be downloaded, and their sizes.
    """
    cached = _cached_snapshot(repo, vision=vision)
    if cached and constants.HF_HUB_OFFLINE and not vision:
        return cached
    try:
        folder, files = missing_files(repo, vision=vision)
        announce(files)
        download_files(repo, folder, files)
        return folder
    except HubError as error:
        # The output is the same without the head, so a cached model runs. A conversion would lose the head for good.
        if cached is None or vision:
            raise
        HEAD_DOWNLOAD_ERRORS[cached] = str(error)
        LOG.warning("%s: runs without its MTP head, which could not be downloaded: %s", repo, error)
        return cached


def missing_files(repo: str, *, text: bool = True, vision: bool = False) -> tuple[Path, dict[str, int]]:
    """Return the cached folder of a hub model, and the files of its weights that are not in it, with their sizes.

    All other files are downloaded. The head's weights are always wanted, those of `text` and `vision` by choice.
    """
    cached = _cached_snapshot(repo, text=text, vision=vision)
    if cached and not _lacks_head(cached):
        return cached, {}
    # A cached model may lack only its head: mlx-lm does not download sidecars. Stay at its revision.
    revision = cached.name if cached else None
    with _hub_errors(repo):
        siblings = HfApi().model_info(repo, revision=revision, timeout=10, files_metadata=True).siblings or []
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=SMALL_FILES))
    sizes = {file.rfilename: file.size or 0 for file in siblings}
    # An unknown family is refused here, before its weights are downloaded.
    config = read_config(folder, drafter=not text)
    names = Names(config)
    sidecars = [name for name in sidecar_names(config) if name in sizes]
    wanted = {*(sidecars[:1] or shard_names(folder, names.is_head))}
    if text:
        wanted |= {NORMS, TABLES, *shard_names(folder, names.is_text)}
    if vision:
        wanted |= {*shard_names(folder, is_vision)}
    if text and not wanted & sizes.keys():
        raise CheckpointError(f"{repo}: {NO_WEIGHTS}")
    missing = [file for file in sorted(wanted & sizes.keys()) if not (folder / file).exists()]
    return folder, {file: sizes[file] for file in missing}


def download_files(repo: str, folder: Path, files: dict[str, int]) -> None:
    """Download files of the given sizes into the cached folder of a hub model, if the disk has space for them."""
    needed = sum(files.values()) - sum(file.stat().st_size for file in folder.parents[1].glob("blobs/*.incomplete"))
    if needed > free_space(folder):
        raise _disk_full(repo, needed)
    if files:
        with _hub_errors(repo, needed):
            snapshot_download(repo, revision=folder.name, allow_patterns=list(files))


@contextmanager
def header_folder(name: str | Path | None = None) -> Iterator[tuple[Path, str]]:
    """Yield a folder to read a model's headers from, and the model's name.

    A model on the hub is not downloaded: a temporary folder links to the files in the cache, and has sparse files of
    nothing but a header for the weights that are not there. The model's name is its id.
    """
    repo = locate(name)
    if isinstance(repo, Path) or _cached_snapshot(repo):
        folder = resolve(name)
        yield folder, str(folder)
        return
    folder, files = missing_files(repo, vision=True)
    with _hub_errors(repo), TemporaryDirectory() as temporary:
        place = Path(temporary, repo)
        shutil.copytree(folder, place, copy_function=lambda file, link: os.symlink(os.path.realpath(file), link))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda file: _copy_header(repo, folder.name, file, place / file), files))
        try:
            yield place, repo
        except CheckpointError as error:
            raise type(error)(str(error).replace(str(place), repo)) from error


@contextmanager
def final_norm_folder(repo: str, folder: Path) -> Iterator[Path]:
    """Yield a folder to read the final norm of a hub model from, whose cached `folder` may lack it: some kilobytes of
    the file that holds it are downloaded."""
    names = Names(read_config(folder, drafter=True))
    files = shard_names(folder, names.is_final_norm)
    if names.drafter or all((folder / file).exists() for file in files):
        yield folder
        return
    with _hub_errors(repo), TemporaryDirectory() as temporary:
        for small in ("config.json", INDEX):
            shutil.copyfile(folder / small, Path(temporary, small))
        for file in files:
            _copy_header(repo, folder.name, file, Path(temporary, file), names.is_final_norm)
        yield Path(temporary)


def _copy_header(
    repo: str, revision: str, file: str, target: Path, wanted: Callable[[str], bool] = lambda name: False
) -> None:
    """Create a sparse file as long as the hub's that has only its header, and the `wanted` tensors."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with HfFileSystem(endpoint=constants.ENDPOINT).open(f"{repo}@{revision}/{file}", block_size=BLOCK) as remote:
        length = remote.read(8)
        target.write_bytes(length + remote.read(min(int.from_bytes(length, "little"), MAX_HEADER)))
        os.truncate(target, remote.size)
        for name, tensor in read_header(target).tensors.items():
            if wanted(name):
                remote.seek(tensor.start)
                with target.open("r+b") as local:
                    local.seek(tensor.start)
                    local.write(remote.read(tensor.nbytes))


@contextmanager
def _hub_errors(repo: str, needed: int = 0) -> Iterator[None]:
    """Turn the errors of huggingface_hub into a HubError with a remedy."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:  # no network, a time-out, offline mode, a hub that is down
        code = error.errno if isinstance(error, OSError) else None
        if code in DISK_FULL or "No space left on device" in str(error):  # hf_xet reports it as a RuntimeError
            raise _disk_full(repo, needed) from error
        if code in NOT_WRITABLE:
            remedy = "Set HF_HUB_CACHE to a folder that can be written to."
        elif isinstance(error, GatedRepoError):
            remedy = "Accept its terms on the hub, then `hf auth login`."
        elif isinstance(error, RepositoryNotFoundError):
            remedy = "Check the spelling; if it is private, `hf auth login`."
        else:
            remedy = "Check the network, or name a folder on this machine."
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0].rstrip(" .:")
        verb = "downloaded" if needed else "read"
        raise HubError(f"{repo}: could not be {verb} from {constants.ENDPOINT} ({reason}). {remedy}") from error


def _disk_full(repo: str, needed: int) -> HubError:
    cache = Path(constants.HF_HUB_CACHE)
    wanted = f"{needed:,} bytes to download, " if needed else ""
    return HubError(
        f"{repo}: the disk is full: {wanted}{free_space(cache):,} bytes free in {cache}. Free some space, or set "
        "HF_HUB_CACHE to a folder on another disk."
    )


def _cached_repo(name: str) -> str | None:
    """Return org/name of the model `name` in the cache."""
    repos = [repo for repo in cached_repos() if repo.partition("/")[2] == name]
    if len(repos) > 1:
        raise CheckpointError(f"{name}: several models of that name are cached. Say {' or '.join(repos)}.")
    return repos[0] if repos else None


def cached_repos() -> list[str]:
    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]


def _cached_snapshot(repo: str, *, text: bool = True, vision: bool = False) -> Path | None:
    """Return the cached folder, if all of the model except perhaps its head is in it."""
    config = try_to_load_from_cache(repo, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    is_text = Names(read_config(folder, drafter=not text)).is_text
    wanted = (shard_names(folder, is_text) if text else []) + (shard_names(folder, is_vision) if vision else [])
    return folder if all((folder / file).exists() for file in wanted) else None


def _lacks_head(folder: Path) -> bool:
    """Return whether config.json promises a head that has not been downloaded, and may be on the hub."""
    config = read_config(folder, drafter=True)
    if not models.head_modules(config) or find_sidecar(folder, config):
        return False
    is_head = Names(config).is_head
    files = [folder / file for file in shard_names(folder, is_head)]
    names = [name for file in files if file.exists() for name in read_header(file).tensors]
    return not all(file.exists() for file in files) or not any(map(is_head, names))


def builtin_models() -> list[Path]:
    return sorted(path for path in BUILTIN.iterdir() if path.is_dir())
