"""The server from its first connection to its last: uvicorn in a thread of its own.

It answers before the models are known: the main thread finds them meanwhile, and then waits for signals.
"""

import asyncio
import gc
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from .listen import Connection, listen
from .log import drop_query
from .states import ServerState

LOG = logging.getLogger("uvicorn.error")
GRACE_SECONDS = 5.0  # for the last bytes, after the last answer has ended
REPEAT_SECONDS = 60.0  # in which the same line is logged once
SWITCH_SECONDS = 0.001  # after which threads take turns: the event loop must not wait long for those that work

Result = TypeVar("Result")

_logged: dict[str, float] = {}  # when each kind of line was logged last


class Server(uvicorn.Server):
    """uvicorn, which closes the device's thread when it stops. It stops by itself if the device is lost.

    After SIGTERM requests are still accepted for `drain` seconds, in which `/health` says that it stops. Then no more
    are, running answers have `deadline` seconds to end by themselves, the rest end with an error, and the connections
    close. Ctrl-C does not wait for new requests, and a second signal for nothing.
    """

    def __init__(
        self,
        app: FastAPI,
        state: ServerState,
        *,
        deadline: float = 30.0,
        drain: float = 0.0,
        reload: Callable[[], None] | None = None,
    ):
        """`reload` is called on SIGHUP."""
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                loop="asyncio",  # Connection sets limits of its transports; uvicorn would prefer uvloop
                log_config=None,  # see log.py
                proxy_headers=False,  # otherwise a local client could pretend to have another's address
                ws="none",  # see Connection, which counts web sockets
                # How many connections asyncio accepts at a time. Where it cannot, it tries again a second later as
                # many times as it failed: more than one would multiply.
                backlog=1,
                timeout_graceful_shutdown=int(deadline + GRACE_SECONDS) + 1,
            )
        )
        self._state, self._deadline, self._drain, self._reload = state, deadline, drain, reload
        self._stop_at = math.inf
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._ended: Future[None] = Future()
        logging.getLogger("uvicorn.access").addFilter(drop_query)
        for name in ("uvicorn.error", "asyncio"):  # clients can cause what they log
            logging.getLogger(name).addFilter(_is_new)

    @contextmanager
    def running(self, bound: socket.socket) -> Iterator[None]:
        """Answer at a bound socket until the block ends, and then stop."""
        listen(bound)
        with ThreadPoolExecutor(1, "http") as thread:
            self._ended = thread.submit(self.run, [bound])
            try:
                yield
            except BaseException:  # such as Ctrl-C while a model is loaded: nothing is waited for
                self._deadline = 0.0
                raise
            finally:
                self.should_exit = True
        self._ended.result()

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        except BaseException as error:
            if not self._loop.done():
                self._loop.set_exception(error)
            raise

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the event loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop.result())

    def wait(self, announce: Callable[[], None]) -> None:
        """Wait, in the main thread, until a signal has stopped the server or its device is lost. `announce` is called
        once signals are waited for."""
        gc.freeze()  # what was imported and loaded stays: no collection need look at it again
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        if (reload := self._reload) is not None:
            handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: reload())
        try:
            announce()
            self._ended.result()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if signal.SIGTERM in self._captured_signals:  # end as one expects of it
            signal.raise_signal(signal.SIGTERM)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_loop_error)
        sys.setswitchinterval(SWITCH_SECONDS)
        await super().startup(sockets)
        for bound in sockets or ():
            listen(bound)  # asyncio has made the queue as short as its backlog
        self._loop.set_result(asyncio.get_running_loop())

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._state.lost or time.monotonic() >= self._stop_at

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._captured_signals.append(sig)
        if len(self._captured_signals) > 1:
            self.should_exit = self.force_exit = True
            Thread(target=self._close_device, args=(0.0,), daemon=True).start()
        elif sig == signal.SIGTERM:
            self._state.draining, self._stop_at = True, time.monotonic() + self._drain
        else:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.close()
        closing = asyncio.create_task(asyncio.to_thread(self._close_device, self._deadline))
        await super().shutdown(sockets)
        await closing
        if self.force_exit:  # uvicorn skips it then, and logs a traceback as the loop closes
            await self.lifespan.shutdown()

    def _close_device(self, deadline: float) -> None:
        if self._state.pool is not None:
            self._state.pool.device.close(deadline)


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop: in one line where the cause is that too many files are open."""
    if isinstance(context.get("exception"), OSError) and "accept" in context["message"]:
        LOG.warning("no connection can be accepted: %s", context["exception"])
    else:
        loop.default_exception_handler(context)


def _is_new(record: logging.LogRecord) -> bool:
    """Return whether no line like it was logged in the last minute."""
    kind, now = str(record.msg).partition("\n")[0], time.monotonic()
    if now - _logged.get(kind, -REPEAT_SECONDS) < REPEAT_SECONDS:
        return False
    _logged[kind] = now
    return True
