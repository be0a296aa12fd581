"""Listening, and stopping with care."""

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
from .connection import Connection

LOG = logging.getLogger("uvicorn.error")
BACKLOG = 2048  # callers that may wait, as many as uvicorn lets
GRACE = 5.0  # seconds for the last bytes, after the last answer has ended
QUIET = 60.0  # seconds in which the same line is logged once


def bind(host: str, port: int) -> socket.socket:
    """A place to listen at. Callers are refused there until `listen`."""
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
        return place
    except OSError as error:
        place.close()
        raise _cannot_listen(host, port, error) from error


def listen(place: socket.socket) -> None:
    """From here on callers wait until the server runs."""
    try:
        place.listen(BACKLOG)
    except OSError as error:  # another that was bound there too came first
        host, port, *_ = place.getsockname()
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> HeadstartError:
    return HeadstartError(f"{host}:{port}: cannot listen there ({error}): choose another --port or --host")


class Server(uvicorn.Server):
    """uvicorn, with the room closed when it stops: running answers have `deadline` seconds to end by themselves, the
    rest end with an error, and then the connections do. A second Ctrl-C is the deadline."""

    def __init__(self, app: FastAPI, room: EngineThread, *, deadline: float = 30.0):
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                log_config=None,  # see log.py
                proxy_headers=False,  # else a local client could take another's address
                ws="none",  # there are none here, and they would not be counted as connections
                # How many connections asyncio accepts at a time. Where it cannot, it tries again a second later as
                # many times as it failed: more than one would multiply.
                backlog=1,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=int(deadline + GRACE) + 1,
            )
        )
        self._room, self._deadline = room, deadline
        for name in ("uvicorn.error", "asyncio"):  # what they log, clients can cause
            logging.getLogger(name).addFilter(REPEATED)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_report)
        await super().startup(sockets)
        for place in sockets or ():
            listen(place)  # asyncio has made the queue as short as its backlog

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit:  # asked twice: no more waiting
            Thread(target=self._room.close, args=(0,), daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self._room.close, self._deadline))
        await super().shutdown(sockets)
        await closing
        if self.force_exit:  # uvicorn leaves it out then, and logs a traceback as the loop closes
            await self.lifespan.shutdown()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop: in one line where the cause is that too many files are open."""
    if isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
        LOG.warning("no connection can be accepted: %s", context["exception"])
    else:
        loop.default_exception_handler(context)


class Repeated(logging.Filter):
    """Drop lines like one that was logged less than a minute before."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg).partition("\n")[0], time.monotonic()
        if now - self._logged.get(kind, -QUIET) < QUIET:
            return False
        self._logged[kind] = now
        return True


REPEATED = Repeated()
