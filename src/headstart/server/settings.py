"""The settings that `PATCH /v1/settings` changes, and the user's file that keeps them for the next start.

Only what was set is kept, so that everything else follows the model. A file that cannot be read is reported and
ignored, and the next change replaces it.
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
from .errors import Refusal, refuse
from .log import LOG


def user_settings_file() -> Path:
    """Return ~/.config/headstart/settings.json, or its place on this platform."""
    return Path(typer.get_app_dir("headstart")) / "settings.json"


class SettingsChange(BaseModel):
    """New settings. Those left out, or null, stay as they are."""

    model_config = ConfigDict(strict=True, extra="forbid")

    speculation: bool | None = None
    max_k: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Preferences:
    """The engine's settings as the user wants them. Without a file they last as long as the server."""

    def __init__(self, engine_thread: EngineThread, file: Path | None = None):
        self._engine_thread = engine_thread
        self._file = file
        self._lock = Lock()
        self._problem: str | None = None
        self._unsaved: dict[str, Any] = {}  # set, but not written to the file
        if saved := self._read():
            limit = engine_thread.engine.model.max_k  # the file may have been written for another model
            engine_thread.configure(**saved | {"max_k": min(saved.get("max_k", limit), limit)})

    def report(self) -> dict[str, Any]:
        """Return the settings. `problem`: why they differ from the saved ones, or could not be saved."""
        return {**asdict(self._engine_thread.settings), "problem": self._problem}

    def change(self, change: SettingsChange) -> None:
        """Apply a change to new requests, whether or not it can be saved. Callable from any thread."""
        given, model = change.given, self._engine_thread.engine.model
        for name in given:
            if given[name] and not model.has_head:
                refuse(name, f"this model cannot draft: {model.head_unavailable}", "unsupported")
        if given.get("max_k", 0) > model.max_k:
            message = f"max_k is {given['max_k']}; this model drafts at most {model.max_k}"
            raise Refusal(400, message, param="max_k", code="invalid_value")
        with self._lock:
            self._engine_thread.configure(**given)
            self._unsaved |= given
            if self._file is not None:
                self._write(self._file, self._read() | self._unsaved)  # another server may have written since

    def _read(self) -> dict[str, Any]:
        if self._file is None:
            return {}
        try:
            saved = SettingsChange.model_validate(json.loads(self._file.read_text(encoding="utf-8"))).given
            Settings(**saved)  # refuses values out of range
            return saved
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, RequestError) as error:
            self._report(f"cannot be read ({_cause(error)}): it is ignored, and the next change replaces it")
            return {}

    def _write(self, file: Path, saved: dict[str, Any]) -> None:
        """Replace the file as a whole: a crash leaves either the old or the new one."""
        file = Path(os.path.realpath(file))  # a link stays one
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent, prefix=".settings-") as folder:
                new = Path(folder) / file.name
                with new.open("x", encoding="utf-8") as opened:
                    opened.write(json.dumps(saved, indent=2) + "\n")
                    opened.flush()
                    os.fsync(opened.fileno())
                os.replace(new, file)
        except OSError as error:
            self._report(f"cannot be written ({error.strerror}): this change lasts until the server stops")
        else:
            self._problem = None
            self._unsaved = {}

    def _report(self, problem: str) -> None:
        assert self._file is not None
        self._problem = f"{self._file.name} {problem}"  # clients do not learn the folder
        LOG.warning("%s %s", self._file, problem)


def _cause(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
    return str(error.strerror if isinstance(error, OSError) else error).partition("\n")[0]
