"""The thread that owns the device. Engines, one per loaded model, take turns on it: one iteration each.

Engines recover from failed steps by themselves. If the thread dies all the same, it is restarted once and every
request continues; if it dies again, or the device is lost to this process, all requests end with the error.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread, current_thread
from typing import Any

from ..error_log import LOG, log_error
from ..errors import DeviceLost, EngineDown
from ..sampling.bounds import start_deep
from ..thread_exit import wait_at_exit
from .device_error import raise_if_lost
from .engine import Engine
from .recovery import Trouble


class DeviceThread:
    def __init__(self) -> None:
        self.engines: tuple[Engine, ...] = ()  # replaced, never changed: other threads read it
        self.memory: int | None = None  # bytes that the sequences of all engines share; None: each has its own limit
        self.restarts = 0
        self.problem: str | None = None  # why the thread died
        self.lost = False  # the device does nothing for this process any more
        self.closing = False  # new requests are refused
        self._trouble: Trouble | None = None  # of this thread, or of an engine that is gone
        self._stopped = False  # no engine is run any more
        self._wake = Condition()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._thread: Thread | None = None

    @property
    def healthy(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not (self.closing or self.lost)

    @property
    def failed(self) -> bool:
        """Return whether the thread has ended though it was not closed: `problem` says why."""
        ended = self._thread is not None and not self._thread.is_alive()
        return self.lost or (ended and not self.closing)

    @property
    def trouble(self) -> Trouble | None:
        """Return what the device, or its thread, has last recovered from."""
        troubles = (self._trouble, *(engine.recovery.trouble for engine in self.engines))
        return max(filter(None, troubles), key=lambda each: each.when, default=None)

    def add(self, engine: Engine) -> None:
        self.engines = (*self.engines, engine)

    def remove(self, engine: Engine) -> None:
        """Run an engine no more. It must have no requests."""
        self._trouble = self.trouble
        self.engines = tuple(each for each in self.engines if each is not engine)

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is not None and self._thread.is_alive() and self._thread is not current_thread():
            return
        for engine in self.engines:
            engine.model.backend.release()  # by the thread that warmed the engines up
        self._thread = Thread(target=self._run, name="device", daemon=True)
        start_deep(self._thread)  # grammars recurse

    def wake(self, engine: Engine) -> None:
        """Have the requests run that an engine was just given, or end them if nothing runs any more."""
        with self._wake:
            if self._stopped:
                engine.end_all(EngineDown(f"the engine is down ({self.problem or 'it was closed'})"))
            self._wake.notify()

    def call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function in this thread, between two iterations. If it takes long, it calls `give_way`."""
        future: Future[Any] = Future()
        with self._wake:
            if self._stopped or self.closing:
                future.set_exception(EngineDown(f"the engine is down ({self.problem or 'it was closed'})"))
            else:
                self._calls.append((function, future))
                self._wake.notify()
        return future

    def give_way(self) -> None:
        """Let the engines run an iteration, from within a function that `call` runs."""
        if self.closing:
            raise EngineDown("the server is shutting down")
        try:
            self._take_turns()
        except Exception as error:  # is no error of the function
            raise SystemExit(f"{type(error).__name__}: {error}") from error

    def close(self, deadline: float) -> None:
        """Refuse new requests, wait up to `deadline` seconds for the running ones, and cancel the rest."""
        self.closing = True
        with self._wake:
            self._wake.notify()
        if self._thread is None:
            return
        self._thread.join(deadline)
        if self._thread.is_alive():
            for engine in self.engines:
                engine.cancel_all()
            self._thread.join(10)
        for engine in self.engines:
            engine.close()

    def _run(self) -> None:
        wait_at_exit()
        try:
            while self._wait_for_work():
                if self._calls:
                    _complete(*self._calls.popleft())
                self._take_turns()
        except BaseException as error:
            self.lost = isinstance(error, DeviceLost)
            self.problem = str(error) if self.lost else f"{type(error).__name__}: {error}"
            log_error(LOG, "the engine's thread died", error=error)
            if self.lost or not self._restart():
                self._stop(EngineDown(f"the engine died: {self.problem}"))

    def _take_turns(self) -> None:
        for engine in self.engines:
            if self.memory is not None:
                self._share_memory(engine)
            if engine.scheduler.busy:
                engine.run_once()
                self._recompute_others(engine)

    def _recompute_others(self, engine: Engine) -> None:
        """Recompute what other engines have on the device, if a command of this one failed: theirs are void as well,
        and MLX has reported it."""
        if engine.recovery.lost_commands:
            engine.recovery.lost_commands = False
            for each in self.engines:
                if each is not engine and each.scheduler.busy:
                    each.recovery.recompute_all("device")

    def _share_memory(self, engine: Engine) -> None:
        """Give an engine what the sequences of the others leave. While one of them cannot admit its first request for
        lack of memory, the others admit none."""
        assert self.memory is not None
        others = [each for each in self.engines if each is not engine]
        engine.scheduler.memory, engine.scheduler.others = (
            self.memory,
            sum(each.scheduler.admitted_bytes for each in others),
        )
        engine.scheduler.admits = not any(each.scheduler.starved for each in others) or engine.scheduler.starved

    def _restart(self) -> bool:
        if self.restarts or self.closing:
            return False
        self.restarts += 1
        self._trouble = Trouble(f"the engine's thread died ({self.problem}) and was restarted")
        try:
            for engine in self.engines:
                engine.recovery.recompute_all()
            self.start()
        except Exception as error:  # the device is lost, or no thread can be started
            log_error(LOG, "the engine's thread could not be restarted", error=error)
            self.problem = f"{self.problem}; then {type(error).__name__}: {error}"
            return False
        LOG.warning("the engine's thread was restarted: all requests continue")
        return True

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do. Return False if the thread is closing and nothing is left."""
        with self._wake:
            while not self._calls and not any(engine.scheduler.busy for engine in self.engines):
                if self.closing:
                    self._stopped = True
                    return False
                self._wake.wait()
        return True

    def _stop(self, error: EngineDown) -> None:
        with self._wake:  # `wake` ends requests that come after this
            self._stopped = True
            for engine in self.engines:
                engine.end_all(error)
            for _, future in self._calls:
                future.set_exception(error)


def _complete(function: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
        raise_if_lost(error)
    except BaseException as error:
        future.set_exception(EngineDown(f"the engine died: {type(error).__name__}: {error}"))
        raise
