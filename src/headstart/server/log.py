"""The server's log on standard error: it never blocks, and never quotes a client."""

import contextvars
import logging
import os
import select
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.log import format_error

ACCESS = logging.getLogger("headstart.access")
PIECE = 512  # bytes that a pipe which is ready takes without blocking, on every system (POSIX's least PIPE_BUF)
LONGEST_PATH = 200


def configure(level: str, *, access: bool) -> None:
    """Send all records of the process to standard error: ours from `level` on, others' from warnings on."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, Log)]:
        root.removeHandler(handler)
    handler = Log()
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    logging.getLogger("headstart").setLevel(level.upper())
    ACCESS.setLevel(logging.INFO if access else logging.CRITICAL)


class Formatter(logging.Formatter):
    def formatException(self, ei: Any) -> str:  # logging's name
        return format_error(ei[1])


class Log(logging.Handler):
    """Writes to standard error what it takes at once. The rest is dropped and counted: a pipe that nobody reads must
    not stop the server."""

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
                data = data[os.write(self.file, data[:PIECE]) :]
            self.dropped = self.dropped + 1 if data else 0
        except OSError:  # nobody can read it any more
            self.dropped += 1
        except Exception:
            self.handleError(record)


@dataclass
class Exchange:
    """What the access log says of a request and its response."""

    status: int = 499  # the client left before there was one
    prompt_tokens: int = 0
    generation_tokens: int = 0


exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("exchange", default=None)


class AccessLog:
    """Logs every request when its response has ended: never a query, a header or a body."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not ACCESS.isEnabledFor(logging.INFO):
            await self.app(scope, receive, send)
            return
        ours, began = Exchange(), time.perf_counter()
        exchange.set(ours)

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours.status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, seen)
        finally:
            path, seconds = quote(scope["path"])[:LONGEST_PATH], time.perf_counter() - began
            ACCESS.info(
                "%s %s %d %.3fs prompt_tokens=%d generation_tokens=%d",
                scope["method"], path, ours.status, seconds, ours.prompt_tokens, ours.generation_tokens,
            )  # fmt: skip
