"""`serve --record FILE`: keep conversations as they are, for `train-head --from-traffic FILE`.

Off unless it is asked for. The file stays on this machine, and only its owner can read it.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from ..engine import Event, Request
from ..errors import RequestError
from .log import LOG

WHOLE = ("stop", "length")  # how answers end that are kept
Listener = Callable[[Event], None]


class Recorder:
    def __init__(self, path: Path):
        self.path, self._lock, self._full = path, Lock(), False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.fchmod(self._file, 0o600)
        except OSError as error:
            raise RequestError(f"--record {path}: {error.strerror}") from error

    def following(self, request: Request, vocabulary: int, listener: Listener) -> Listener:
        """Return the listener of a request, which also keeps what it hears. Prompts with images are left out: their
        tokens do not say what is in them."""
        if request.images:
            return listener
        answers: dict[int, list[int]] = {}

        def listen(event: Event) -> None:
            answers.setdefault(event.choice, []).extend(event.tokens)
            if event.finish_reason in WHOLE:
                self._write(request, answers.pop(event.choice), vocabulary)
            listener(event)

        return listen

    def _write(self, request: Request, answer: list[int], vocabulary: int) -> None:
        tokens = [*map(int, request.prompt), *answer]
        line = {"vocabulary": vocabulary, "prompt": len(request.prompt), "tokens": tokens}
        data = json.dumps(line).encode() + b"\n"
        with self._lock:
            if self._full:
                return
            before = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, data)
            except OSError:
                written = 0
            if written < len(data):
                os.ftruncate(self._file, before)
                self._full = True
                LOG.error("--record %s: the disk is full: nothing more is recorded", self.path)
