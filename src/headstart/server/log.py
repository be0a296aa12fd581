"""The server's log on standard error: it never blocks, and never quotes a client."""

import logging
import select
import sys
from contextlib import suppress
from typing import Any, TextIO

from ..error_log import format_error

LOG = logging.getLogger("headstart.server")


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
    logging.getLogger("uvicorn.access").setLevel(logging.INFO if access else logging.WARNING)


def drop_query(record: logging.LogRecord) -> bool:
    """Leave what follows the path out of a line of the access log: a client may have put its key there."""
    if isinstance(record.args, tuple) and len(record.args) == 5:
        client, method, path, version, status = record.args
        record.args = (client, method, str(path).partition("?")[0], version, status)
    return True


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

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        """Do nothing where the reader has gone, instead of writing about it."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)
