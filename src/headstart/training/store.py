"""What a training keeps on disk, so that it goes on after Ctrl-C, a kill or a full disk; and the head that it writes.

FOLDER/config.json, mtp/weights.safetensors, mtp/card.toml, draft_vocabulary.json     the head, when it is finished
FOLDER/training/settings.json, text.jsonl, state.safetensors, best.safetensors        what goes on
"""

import errno
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoint.atomic import DISK_FULL, replace_file, staging_folder
from ..checkpoint.convert import PARTS, SIDECAR, declare_head
from ..checkpoint.draft_vocabulary import choose_draft_tokens, write_draft_tokens
from ..checkpoint.head import CARD, SIZES
from ..checkpoint.layout import Layout
from ..checkpoint.quantize import Recipe, choose_quantization
from ..checkpoint.safetensors import write_safetensors
from ..errors import CheckpointError
from ..kernels.norms import Norm
from ..models import Model, text_config
from .text import Row, append_rows, read_rows

WORK = "training"
LARGE = 16384  # tokens of a vocabulary from which on a quarter of it is worth a list


@dataclass
class State:
    """How far a training is."""

    seconds: float = 0.0
    steps: int = 0
    trained: int = 0  # tokens, each time that one was trained on
    asked: int = 0  # prompts that were answered
    rows: int = 2  # of a step
    measured: list[list[float]] = field(default_factory=list)  # seconds, loss, then acceptance by position

    @property
    def best(self) -> list[float] | None:
        return max(self.measured, key=quality, default=None)


def tokens_per_round(measured: Sequence[float]) -> float:
    """Return the tokens of a round with as many drafts as a chain has steps."""
    return 1 + sum(measured[2:])


def quality(measured: Sequence[float]) -> tuple[float, float]:
    """Return what tells the better of two heads: tokens of a round, and where they are equal the loss."""
    return tokens_per_round(measured), -measured[1]


class Store:
    def __init__(self, folder: Path, layout: Layout, about: dict[str, str]):
        """Begin, or go on with what is there.

        Args:
            about: What the training is made from, by what to call it.
        """
        self.folder, self.work, self.layout = folder, folder / WORK, layout
        self.vocabulary = int(text_config(layout.config)["vocab_size"])
        if folder.is_dir() and any(folder.iterdir()) and not self.work.is_dir():
            raise CheckpointError(f"{folder}: exists already, and is no training. Name a new folder.")
        text = text_config(layout.config)
        settings = {"family": layout.family, **{name: text.get(name) for name in SIZES}, **about}
        with self.writing():
            self.work.mkdir(parents=True, exist_ok=True)
            self._check(json.loads(json.dumps(settings)))

    def _check(self, settings: dict[str, Any]) -> None:
        file = self.work / "settings.json"
        if not file.exists():
            (self.work / "settings.new").write_text(json.dumps(settings))
            replace_file(self.work / "settings.new", file)
        try:
            before = json.loads(file.read_text())
        except ValueError as error:
            raise CheckpointError(f"{file}: not the settings of a training. Remove {self.work}.") from error
        if different := next((name for name in settings if before.get(name) != settings[name]), None):
            raise CheckpointError(
                f"{self.folder}: holds the training of another head: its {different} is {before.get(different)}, and "
                f"now {settings[different]}. Name another folder."
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Name the folder and the remedy where the disk is full."""
        try:
            yield
        except OSError as error:
            if error.errno in (*DISK_FULL, errno.EFBIG):
                raise CheckpointError(
                    f"{self.folder}: the disk is full. What was trained until the last checkpoint is kept: free some "
                    "space and give the same command again."
                ) from error
            raise CheckpointError(f"{self.folder}: writing failed ({error.strerror or error}).") from error

    def rows(self, name: str) -> list[Row]:
        file = self.work / name
        return list(read_rows(file, str(file), self.vocabulary)) if file.exists() else []

    def add(self, name: str, rows: Sequence[Row]) -> None:
        with self.writing():
            append_rows(self.work / name, rows, self.vocabulary)

    def save(self, state: State, parameters: Any, optimiser: Any) -> None:
        """Write a checkpoint in place of the one before."""
        arrays = {f"p.{name}": a for name, a in _flat(parameters)} | {f"o.{name}": a for name, a in _flat(optimiser)}
        self._write("state", arrays, json.dumps(asdict(state)))

    def save_best(self, parameters: Any) -> None:
        self._write("best", dict(_flat(parameters)), "")

    def restore(self) -> tuple[State, Any, Any] | None:
        """Return the last checkpoint; None before the first."""
        if (found := self._read("state")) is None:
            return None
        arrays, about = found
        trees = [
            tree_unflatten([(name[2:], a) for name, a in arrays.items() if name.startswith(prefix)])
            for prefix in ("p.", "o.")
        ]
        return State(**json.loads(about["state"])), *trees

    def best(self) -> Any:
        found = self._read("best")
        return tree_unflatten(list(found[0].items())) if found else None

    def _write(self, name: str, arrays: dict[str, mx.array], about: str) -> None:
        temporary = self.work / f"{name}.new.safetensors"
        with self.writing():
            try:
                mx.save_safetensors(str(temporary), arrays, {"state": about})
            except RuntimeError as error:  # what MLX says of a full disk
                temporary.unlink(missing_ok=True)
                raise OSError(errno.ENOSPC, str(error)) from error
            replace_file(temporary, self.work / f"{name}.safetensors")

    def _read(self, name: str) -> tuple[dict[str, mx.array], dict[str, str]] | None:
        file = self.work / f"{name}.safetensors"
        if not file.exists():
            return None
        try:
            loaded: Any = mx.load(str(file), return_metadata=True)
            arrays, about = loaded
            mx.eval(arrays)
        except RuntimeError as error:
            raise CheckpointError(f"{file}: cannot be read. Remove {self.work} to begin again.") from error
        return arrays, about

    def publish(self, arrays: dict[str, mx.array], card: str, counts: Counter[int]) -> None:
        """Write the head as a folder that `load`, `serve`, `graft` and `convert` take, config.json last."""
        config = json.loads(json.dumps(self.layout.config))
        declare_head(config, SIDECAR)
        with staging_folder(self.folder / "mtp") as made:
            write_safetensors(made / "weights", arrays, lambda written: None)
            (made / "card").write_text(card)
            (made / "config").write_text(json.dumps(config, indent=4))
            if self.vocabulary >= LARGE:
                tokens = choose_draft_tokens(counts, self.vocabulary // 4, self.vocabulary)
                write_draft_tokens(made, tokens, f"frequencies of {counts.total()} tokens", self.vocabulary)
                replace_file(made / "draft_vocabulary.json", self.folder / "draft_vocabulary.json")
            replace_file(made / "weights", self.folder / SIDECAR)
            replace_file(made / "card", self.folder / CARD)
            replace_file(made / "config", self.folder / "config.json")


def rounded(model: Model, recipe: Recipe) -> tuple[dict[str, mx.array], Any]:
    """Return a head's arrays as they are stored, and its trained parameters as they are then read."""
    arrays: dict[str, mx.array] = {}
    read: list[tuple[str, mx.array]] = []
    mtp = model.weights.mtp
    choose = recipe.for_head(model.family.head)
    for path, module in mtp.named_modules():
        own = {name: a for name, a in module.items() if isinstance(a, mx.array) and not name.startswith("_")}
        how = choose_quantization(f"mtp.{path}", module, choose) if isinstance(module, nn.Linear) else None
        for name, array in own.items():
            if how is not None and name == "weight":
                parts = mx.quantize(array.astype(recipe.dtype), **how)
                arrays |= {f"mtp.{path}.{part}": a for part, a in zip(PARTS, parts, strict=False)}
                read.append((f"{path}.weight", mx.dequantize(*parts, **how).astype(mx.float32)))
                continue
            kept = isinstance(module, Norm) or "scales" in own
            array = array if kept else array.astype(recipe.dtype)
            arrays[f"mtp.{path}.{name}"] = array
            read.append((f"{path}.{name}", array if "scales" in own else array.astype(mx.float32)))
    return arrays, tree_unflatten([(name, a) for name, a in read if ".switch_mlp." not in f".{name}"])


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    found: Any = tree_flatten(tree)
    return found
