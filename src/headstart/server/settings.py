"""What `PATCH /v1/settings` changes, and the file of the user's that keeps it for the next start.

Only what was set is kept, so that all else goes on to follow the model. A file that cannot be read is reported and
ignored, and the next change writes it anew.
"""

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from ..engine import EngineThread, Settings
from ..errors import RequestError
from .errors import Refusal
from .fault import LOG


def settings_of_the_user() -> Path:
    """~/.config/headstart/settings.json, or where the platform keeps such things."""
    return Path(typer.get_app_dir("headstart")) / "settings.json"


class Change(BaseModel):
    """What is left out, or null, stays as it is."""

    model_config = ConfigDict(strict=True, extra="forbid")

    speculation: bool | None = None
    max_k: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Preferences:
    """The room's settings as the user wants them. Without a file they last as long as the server."""

    def __init__(self, room: EngineThread, file: Path | None = None):
        self._room, self._file = room, file
        self._lock = Lock()
        self._problem: str | None = None
        self._unwritten: dict[str, Any] = {}  # what was set and could not be kept
        if kept := self._read():
            most = room.engine.model.max_k  # of this model; the file may have been written for another
            room.configure(**kept | {"max_k": min(kept.get("max_k", most), most)})

    def report(self) -> dict[str, Any]:
        """`problem`: why they are not what was kept, or will not be."""
        return {**asdict(self._room.settings), "problem": self._problem}

    def change(self, change: Change) -> None:
        """From any thread. It holds for requests that come after, whether or not it can be kept."""
        self._check(change.given)
        with self._lock:
            self._room.configure(**change.given)
            self._unwritten |= change.given
            if self._file is not None:
                self._write(self._file, self._read() | self._unwritten)  # another server may have written since

    def _check(self, wanted: dict[str, Any]) -> None:
        model = self._room.engine.model
        for name, off in (("speculation", False), ("max_k", 0)):
            if wanted.get(name, off) != off and not model.has_head:
                message = f"{name}: this model cannot draft: {model.head_unavailable}"
                raise Refusal(400, message, param=name, code="unsupported")
        if wanted.get("max_k", 0) > model.max_k:
            message = f"max_k is {wanted['max_k']}; this model drafts at most {model.max_k}"
            raise Refusal(400, message, param="max_k", code="invalid_value")

    def _read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            kept = Change.model_validate(json.loads(self._file.read_text(encoding="utf-8"))).given
            Settings(**kept)  # refuses what is out of bounds
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, ValidationError, RequestError) as error:
            self._report(f"cannot be read ({_first_line(error)}): it is ignored, and the next change writes it anew")
            return {}
        return kept

    def _write(self, file: Path, kept: dict[str, Any]) -> None:
        """The whole file or nothing of it, whenever the power goes."""
        file = Path(os.path.realpath(file))  # a link stays one
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=file.parent, prefix=".settings-", delete=False
            ) as new:
                try:
                    new.write(json.dumps(kept, indent=2) + "\n")
                    new.flush()
                    os.fsync(new.fileno())
                    os.replace(new.name, file)
                except OSError:
                    os.unlink(new.name)
                    raise
        except OSError as error:
            self._report(f"cannot be written ({error.strerror}): this change lasts until the server stops")
        else:
            self._problem, self._unwritten = None, {}

    def _report(self, problem: str) -> None:
        """Its folder is for the log: clients may be anywhere."""
        assert self._file is not None
        self._problem = f"{self._file.name} {problem}"
        LOG.warning("%s %s", self._file, problem)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
    return str(error.strerror if isinstance(error, OSError) else error).partition("\n")[0]
