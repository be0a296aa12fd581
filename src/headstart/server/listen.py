"""Listening for connections, and stopping without cutting off running answers."""

import asyncio
import logging
import socket
import time
from threading import Thread
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..engine import EngineThread
from ..errors import HeadstartError
from .connection import LOG, Connection

BACKLOG = 2048  # connections that may wait to be accepted, as in uvicorn
GRACE_SECONDS = 5.0  # for the last bytes, after the last answer has ended
REPEAT_SECONDS = 60.0  # in which the same line is logged once


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Connections are refused there until `listen`."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        return bound
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from error


def listen(bound: socket.socket) -> None:
    """Let connections wait until the server runs."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:  # another process that was bound there too came first
        host, port, *_ = bound.getsockname()
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> HeadstartError:
    return HeadstartError(f"cannot listen on {host}:{port} ({error}): choose another --port or --host")


class Server(uvicorn.Server):
    """uvicorn, which closes the engine's thread when it stops.

    Running answers have `deadline` seconds to end by themselves, then the rest end with an error, and then the
    connections close. A second Ctrl-C ends the wait.
    """

    def __init__(self, app: FastAPI, engine_thread: EngineThread, *, deadline: float = 30.0):
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,  # see log.py
                proxy_headers=False,  # otherwise a local client could pretend to have another's address
                ws="none",  # websockets are not used, and would not be counted as connections
                # How many connections asyncio accepts at a time. Where it cannot, it tries again a second later as
                # many times as it failed: more than one would multiply.
                backlog=1,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=int(deadline + GRACE_SECONDS) + 1,
            )
        )
        self._engine_thread = engine_thread
        self._deadline = deadline
        for name in ("uvicorn.error", "asyncio"):  # clients can cause what they log
            logging.getLogger(name).addFilter(REPEATED)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        await super().startup(sockets)
        for bound in sockets or ():
            listen(bound)  # asyncio has made the queue as short as its backlog

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:  # the second signal: do not wait
            Thread(target=self._engine_thread.close, args=(0,), daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self._engine_thread.close, self._deadline))
        await super().shutdown(sockets)
        await closing
        if self.force_exit:  # uvicorn skips it then, and logs a traceback as the loop closes
            await self.lifespan.shutdown()


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop: in one line where the cause is that too many files are open."""
    if isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
        LOG.warning("no connection can be accepted: %s", context["exception"])
    else:
        loop.default_exception_handler(context)


class RepeatFilter(logging.Filter):
    """Drop lines like one that was logged less than a minute before."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg).partition("\n")[0], time.monotonic()
        if now - self._logged.get(kind, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._logged[kind] = now
        return True


REPEATED = RepeatFilter()
