"""Which models are on this machine: the built-in ones, those of our families in the Hugging Face cache, and those in
folders that are named."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from ..cards import Dispatch
from ..errors import CheckpointError
from .config import read_config
from .hub import BUILTIN
from .layout import Layout, read_layout


@dataclass(frozen=True)
class Found:
    """A model on disk. Without a layout it cannot be loaded, and `problem` says why."""

    name: str  # as `--model` takes it
    folder: Path
    layout: Layout | None
    problem: str | None = None

    @property
    def dispatch(self) -> Dispatch | None:
        """What its head would do if nobody opted out."""
        return self.layout.dispatch(mtp=True) if self.layout else None

    def report(self) -> dict[str, Any]:
        """The JSON of `headstart models`."""
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


def on_disk(folders: Sequence[Path] = ()) -> list[Found]:
    """`folders` are models, or hold them: what `convert` wrote may lie anywhere."""
    builtin = [_look(path.name, path) for path in sorted(BUILTIN.iterdir()) if path.is_dir()]
    cached = []
    for repo in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        try:
            config = try_to_load_from_cache(name, "config.json")
        except HFValidationError:  # no hub gives such a name: somebody else's folder, or a copy of one
            continue
        if isinstance(config, str) and _is_ours(Path(config).parent):
            cached.append(_look(name, Path(config).parent))
    named = [_look(str(model), model) for folder in folders for model in _models_in(folder)]
    return builtin + cached + named


def _models_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder.")
    found = [path for path in (folder, *sorted(folder.iterdir())) if (path / "config.json").is_file()]
    if not found:
        raise CheckpointError(f"{folder}: no model, and no folder of a model in it.")
    return found


def _is_ours(folder: Path) -> bool:
    """The cache is full of other people's models."""
    try:
        read_config(folder)
    except CheckpointError:
        return False
    return True


def _look(name: str, folder: Path) -> Found:
    try:
        return Found(name, folder, read_layout(folder))
    except CheckpointError as error:
        return Found(name, folder, None, str(error))
