"""Notes on disk what is being tried. What ended the process, or the machine, is not tried again.

A process holds the lock of its note as long as it lives, so a note that can be locked is one of a process that ended
in a trial.
"""

import fcntl
import json
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...errors import HeadstartError
from ..cache import refuse_shared

LONGEST = 120.0  # seconds that one trial may take: a kernel that compiles, some twelve times
CRASHED = "crashed.json"
LOG = logging.getLogger("headstart")


def _end_process() -> None:
    sys.stderr.flush()
    os._exit(70)  # an internal error, as sysexits.h has it


class Trials:
    """The trials of one check. Where the folder cannot be used, nothing is noted."""

    def __init__(
        self, folder: Path, valid_for: str, longest: float = LONGEST, end: Callable[[], None] = _end_process
    ) -> None:
        self._folder, self._valid_for, self._longest, self._end = folder, valid_for, longest, end
        self._note: IO[str] | None = None
        self._crashed: set[tuple[str, str]] = set()
        with suppress(OSError, HeadstartError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_shared(folder)
            self._crashed = self._collect()
            self._note = tempfile.NamedTemporaryFile("w", dir=folder, prefix="trying-", delete=False)  # noqa: SIM115
            fcntl.flock(self._note, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def refusal(self, operation: str, candidate: str) -> str | None:
        """Return why a candidate must not be tried again."""
        if (operation, candidate) not in self._crashed:
            return None
        remedy = f"to try again, delete {self._folder / CRASHED}"
        return f"crashed: the process or the machine ended when it was tried; {remedy}"

    @contextmanager
    def trying(self, operation: str, candidate: str) -> Iterator[None]:
        """Note that a candidate is tried, until it has been. If it takes too long, end the process: what hangs in a
        driver cannot be interrupted, and is not tried by the next one."""
        watch = threading.Timer(self._longest, self._give_up, (operation, candidate))
        watch.daemon = True
        self._write(json.dumps({"for": self._valid_for, "operation": operation, "candidate": candidate}))
        watch.start()
        try:
            yield
        finally:
            watch.cancel()
            self._write("")

    def close(self) -> None:
        if self._note is not None:
            with suppress(OSError):
                Path(self._note.name).unlink()
            self._note.close()
            self._note = None

    def _write(self, text: str) -> None:
        if self._note is None:
            return
        with suppress(OSError):
            self._note.seek(0)
            self._note.truncate()
            self._note.write(text)
            self._note.flush()
            if text:  # it must outlast a panic of the kernel
                fcntl.fcntl(self._note, fcntl.F_FULLFSYNC) if hasattr(fcntl, "F_FULLFSYNC") else os.fsync(self._note)

    def _give_up(self, operation: str, candidate: str) -> None:
        LOG.error(
            "Trying the kernel %s of %s did not end within %.0f s, so this process ends. Start again: the next one "
            "does not try it",
            *(candidate, operation, self._longest),
        )
        self._end()

    def _collect(self) -> set[tuple[str, str]]:
        """Return what crashed before, and add to it what processes that have ended left behind."""
        path = self._folder / CRASHED
        known, left = _read(path, self._valid_for), set[tuple[str, str]]()
        for note in self._folder.glob("trying-*"):
            with suppress(OSError, ValueError, KeyError, TypeError), note.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                text = file.read()
                said: dict[str, str] = json.loads(text) if text else {"for": ""}
                if said["for"] == self._valid_for:
                    left.add((said["operation"], said["candidate"]))
                note.unlink()
        if left - known:
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix="crashed-", delete=False) as made:
                json.dump({self._valid_for: sorted(known | left)}, made, indent=1)
            Path(made.name).replace(path)
        return known | left


def _read(path: Path, valid_for: str) -> set[tuple[str, str]]:
    try:
        return {(str(operation), str(candidate)) for operation, candidate in json.loads(path.read_text())[valid_for]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
