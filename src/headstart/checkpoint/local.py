"""The models on this machine: list them, download others, remove them."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from .. import cards
from ..errors import CheckpointError
from .config import models_below, read_config
from .hub import builtin_models, cached_repos, download_files, locate, missing_files
from .layout import Layout, read_layout

POLL_SECONDS = 0.5  # between two reports of a download's progress

Report = Callable[[int, int], None]  # bytes that are here, and bytes of the whole download


@dataclass(frozen=True)
class LocalModel:
    """A model on disk. Without a layout it cannot be loaded, and `problem` says why."""

    name: str  # as `--model` takes it
    folder: Path
    layout: Layout | None
    problem: str | None = None

    @property
    def dispatch(self) -> cards.Dispatch | None:
        """Return what its head would do if HEADSTART_MTP did not turn it off."""
        return self.layout.dispatch(mtp=True) if self.layout else None

    def report(self) -> dict[str, Any]:
        """Return the JSON of `headstart list`."""
        decision = self.dispatch
        return {
            "id": self.name,
            "card": card.name if self.layout and (card := self.layout.card) else None,
            "path": str(self.layout.path) if self.layout else None,
            "bytes": self.layout.bytes if self.layout else None,
            "problem": self.problem,
            "native_mtp": {
                "available": bool(decision and decision.drafts),
                "reason": decision.reason if decision else None,
                "default_k": decision.k if decision else 0,
                "max_k": decision.max_k if decision else 0,
            },
        }


def local_models(folders: Sequence[Path] = ()) -> list[LocalModel]:
    """Return the built-in models, those of our families in the Hugging Face cache, and those in `folders`.

    A folder is a model, or holds models: what `convert` wrote may be anywhere.
    """
    found = [_local_model(path.name, path) for path in builtin_models()]
    for repo in cached_repos():
        try:
            config = try_to_load_from_cache(repo, "config.json")
            if isinstance(config, str) and read_config(Path(config).parent):
                found.append(_local_model(repo, Path(config).parent))
        except (HFValidationError, CheckpointError):  # not a model's folder, or a model that is not of our families
            continue
    for folder in folders:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder.")
        paths = [folder] if (folder / "config.json").is_file() else models_below(folder)
        if not paths:
            raise CheckpointError(f"{folder}: no model, and no folder of a model in it.")
        found += [_local_model(str(path), path) for path in paths]
    return found


def _local_model(name: str, folder: Path) -> LocalModel:
    try:
        return LocalModel(name, folder, read_layout(folder))
    except CheckpointError as error:
        return LocalModel(name, folder, None, str(error))


def pull(name: str, report: Report = lambda done, total: None) -> Path:
    """Download a model, or those of its files that are not complete.

    `report` is called now and then, in another thread.
    """
    repo = locate(name)
    if isinstance(repo, Path):
        return repo
    folder, files = missing_files(repo)
    ended = Event()
    watcher = Thread(target=_watch, args=(folder, files, report, ended), daemon=True)
    watcher.start()
    try:
        download_files(repo, folder, files)
    finally:
        ended.set()
        watcher.join()
    return folder


def _watch(folder: Path, files: dict[str, int], report: Report, ended: Event) -> None:
    while True:
        last = ended.wait(POLL_SECONDS)
        report(downloaded_bytes(folder, files), sum(files.values()))
        if last:
            return


def downloaded_bytes(folder: Path, files: dict[str, int]) -> int:
    """Return how much of these files is in the cache, unfinished ones included."""
    whole = sum(size for file, size in files.items() if (folder / file).exists())
    parts = sum(file.stat().st_size for file in folder.parents[1].glob("blobs/*.incomplete") if file.exists())
    return min(whole + parts, sum(files.values()))


def cached_folder(name: str) -> Path:
    """Return where the Hugging Face cache keeps a model with all its files and revisions."""
    repo = locate(name)
    if isinstance(repo, Path) and repo in builtin_models():
        raise CheckpointError(f"{name}: not a downloaded model. It comes with Headstart, and stays.")
    if isinstance(repo, Path):
        raise CheckpointError(f"{name}: not a downloaded model. Delete the folder {repo} yourself if you want to.")
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    if not folder.is_dir():
        raise CheckpointError(f"{name}: not in {constants.HF_HUB_CACHE}. `headstart list` shows what is.")
    return folder


def folder_bytes(folder: Path) -> int:
    """Return what a folder takes on disk; a file with several links counts once."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def remove(name: str) -> None:
    """Delete a downloaded model with all its files."""
    folder = cached_folder(name)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(f"{name}: could not be removed: {error}") from error
