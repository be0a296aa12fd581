"""The engine room: one thread that owns the device, and stays up.

An engine that fails in a turn mends itself. Should its thread die all the same, it is started once more, and every
request goes on where it was; if that one dies too, all requests end with the error and the room says so.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import TIMEOUT_MAX, Condition, Thread
from types import TracebackType
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import Busy, EngineDown, RequestError
from ..limits import MAX_K
from ..models import Model
from ..sampling.bounds import start_deep
from .engine import Engine
from .log import LOG, report
from .request import Event, Handle, Request

RESTARTS = 1


@dataclass(frozen=True)
class Settings:
    """What may be changed while the room is open. It applies to requests that come after."""

    speculation: bool = True
    max_k: int = MAX_K

    def __post_init__(self) -> None:
        if not isinstance(self.speculation, bool):
            raise RequestError(f"speculation is {self.speculation!r}; it must be true or false")
        if not isinstance(self.max_k, int) or isinstance(self.max_k, bool) or not 0 <= self.max_k <= MAX_K:
            raise RequestError(f"max_k is {self.max_k!r}; it must be a whole number from 0 to {MAX_K}")


class EngineThread:
    """An engine that runs in a thread of its own, for programs with threads.

    Use it as `with EngineThread(model, tokenizer) as engine`. Any thread may call `submit`, or `generate` and
    `stream_generate` with `engine=engine`; their requests are decoded in one batch. Leaving the block waits for
    running requests.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper | None = None,
        *,
        max_queue: int = 256,
        make: Callable[..., Engine] = Engine,
        **engine: Any,
    ):
        """The arguments are those of Engine, or of what else can `make` one."""
        self.engine = make(model, tokenizer, max_queue=max_queue, **engine)
        self.engine.threaded = True
        self.settings = Settings(max_k=self.engine.model.max_k)
        self.restarts = 0
        self.problem: str | None = None  # why the thread died
        self.closing = False  # no new work is taken
        self._over = False  # nobody turns the engine any more
        self._awake = Condition()
        self._thread: Thread | None = None

    @property
    def healthy(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self.closing

    @property
    def running(self) -> int:
        return len(self.engine.rows)

    @property
    def entering(self) -> int:
        return len(self.engine.entering)

    @property
    def queued(self) -> int:
        return len(self.engine.queue)

    def start(self) -> None:
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        start_deep(self._thread)  # grammars are followed in it

    def __enter__(self) -> "EngineThread":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(0.0 if error is not None else TIMEOUT_MAX)

    def submit(
        self, request: Request, *, client: str = "", listener: Callable[[Event], None] | None = None
    ) -> Handle:
        """From any thread. `listener` is told every event in the engine's thread; without one, iterate the handle.

        RequestError where it cannot be honoured, Busy where it cannot be now, EngineDown where nothing can.
        """
        if self.closing:
            raise Busy("the server is shutting down", retry_after=5)
        if not self.healthy:
            raise EngineDown(f"the engine is down ({self.problem or 'it was not started'}): start it again")
        max_k = self.settings.max_k if self.settings.speculation else 0
        handle = self.engine.submit(request, client=client, listener=listener, max_k=max_k)
        with self._awake:
            if self._over:  # since it was seen to be healthy
                self.engine.end_all(EngineDown(f"the engine is down ({self.problem or 'it was closed'})"))
            self._awake.notify()
        return handle

    def configure(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)

    def close(self, deadline: float) -> None:
        """Take no new work, let what runs finish, and cancel what is left after `deadline` seconds."""
        self.closing = True
        until = time.monotonic() + deadline
        with self._awake:
            self._awake.notify()
        if self._thread is None:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.engine.cancel_all()
            self._thread.join(10)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self.engine.turn()
        except BaseException as error:
            self.problem = f"{type(error).__name__}: {error}"
            report(LOG, "the engine's thread died", error=error)
            if not self._start_again():
                with self._awake:  # a request that comes now ends all as well
                    self._over = True
                    self.engine.end_all(EngineDown(f"the engine died: {self.problem}"))

    def _start_again(self) -> bool:
        if self.restarts >= RESTARTS or self.closing:
            return False
        self.restarts += 1
        try:
            self.engine.recompute_all()
            self.start()
        except Exception as error:  # of the device, which is beyond help then, or of a system without threads
            report(LOG, "the engine's thread could not be started again", error=error)
            self.problem = f"{self.problem}; then {type(error).__name__}: {error}"
            return False
        LOG.warning("the engine's thread was started again: every request goes on")
        return True

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do. False when there is nothing, and nothing will come."""
        with self._awake:
            while not self.engine.busy:
                if self.closing:
                    self._over = True
                    return False
                self._awake.wait()
        return True
