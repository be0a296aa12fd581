"""The server's log on standard error: it never blocks, and never quotes a client."""

import logging
import select
import time
from collections import Counter
from contextlib import suppress
from typing import Any, TextIO
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.log import format_error, log_error

LOG = logging.getLogger("headstart.server")
ACCESS = logging.getLogger("headstart.access")
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


class StderrHandler(logging.StreamHandler[TextIO]):
    """Write to standard error if it is ready, so that a pipe that nobody reads cannot stop the server."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            if select.select([], [self.stream], [], 0)[1]:
                super().emit(record)


class AccessLog:
    """Count responses by status, and log each request when its response has ended: never a query, header or body."""

    def __init__(self, app: ASGIApp, responses: Counter[int]):
        self.app = app
        self.responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 499  # the client left before there was a response
        scope["tokens"] = Counter()  # see Meter

        async def observe(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.responses[status] += 1
            await send(message)

        try:
            await self.app(scope, receive, observe)
        finally:
            ACCESS.info(
                "%s %s %d %.3fs prompt_tokens=%d generation_tokens=%d",
                scope["method"], quote(scope["path"])[:MAX_PATH], status, time.perf_counter() - start,
                scope["tokens"]["prompt"], scope["tokens"]["generation"],
            )  # fmt: skip
