"""The server's log on standard error: it never blocks, and never quotes a client."""

import contextvars
import logging
import os
import select
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.log import format_error, log_error

LOG = logging.getLogger("headstart.server")
ACCESS = logging.getLogger("headstart.access")
PIPE_WRITE = 512  # bytes that a pipe which is ready accepts without blocking, on any system (the least PIPE_BUF)
MAX_PATH = 200  # characters of a path in the access log


def configure_log(level: str, *, access: bool) -> None:
    """Send all log records of the process to standard error: ours from `level` on, others' from warnings on."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, StderrHandler)]:
        root.removeHandler(handler)
    handler = StderrHandler()
    handler.setFormatter(TracebackFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    logging.getLogger("headstart").setLevel(level.upper())
    # It warns of prompts longer than the tokenizer's model_max_length, which is not the model's context.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    ACCESS.setLevel(logging.INFO if access else logging.CRITICAL)


def log_unexpected(error: BaseException) -> None:
    """Log where an unexpected error of a request was raised, without its message, which may quote the prompt."""
    log_error(LOG, "a request failed", error=error)


class TracebackFormatter(logging.Formatter):
    """Format exceptions without their messages, which may quote a client."""

    def formatException(self, ei: Any) -> str:  # logging's name
        return format_error(ei[1])


class StderrHandler(logging.Handler):
    """Write to standard error without blocking. What it does not accept at once is dropped and counted, so that a
    pipe that nobody reads cannot stop the server."""

    dropped = 0

    def __init__(self, file: int = 2):
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = f"{self.format(record)}\n"
            if self.dropped:
                line = f"({self.dropped} records were dropped: standard error was not read)\n{line}"
            data = line.encode(errors="backslashreplace")
            while data and select.select([], [self.file], [], 0)[1]:
                data = data[os.write(self.file, data[:PIPE_WRITE]) :]
            self.dropped = self.dropped + 1 if data else 0
        except OSError:  # its reader has gone
            self.dropped += 1
        except Exception:
            self.handleError(record)


@dataclass
class AccessEntry:
    """What the access log says of a request and its response."""

    status: int = 499  # the client left before there was a response
    prompt_tokens: int = 0
    generation_tokens: int = 0


access_entry: contextvars.ContextVar[AccessEntry | None] = contextvars.ContextVar("access_entry", default=None)


class AccessLog:
    """Count responses by status, and log each request when its response has ended: never a query, header or body."""

    def __init__(self, app: ASGIApp, responses: Counter[int]):
        self.app = app
        self.responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        entry, start = AccessEntry(), time.perf_counter()
        access_entry.set(entry)

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                self.responses[entry.status] += 1
            await send(message)

        try:
            await self.app(scope, receive, observe)
        finally:
            ACCESS.info(
                "%s %s %d %.3fs prompt_tokens=%d generation_tokens=%d",
                scope["method"], quote(scope["path"])[:MAX_PATH], entry.status, time.perf_counter() - start,
                entry.prompt_tokens, entry.generation_tokens,
            )  # fmt: skip
