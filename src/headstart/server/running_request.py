"""A request that the engine has, seen from the event loop. The engine never waits for its reader."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import Request as HTTPRequest

from ..engine import EngineThread, Event, Handle, Request
from ..errors import HeadstartError
from .errors import Refusal
from .metrics import Meter
from .prepare import disconnected, timed_out
from .settings import Limits


class RunningRequest:
    """It has one engine request for each prompt. Their answers are numbered consecutively."""

    def __init__(
        self,
        thread: EngineThread,
        requests: Sequence[Request],
        limits: Limits,
        *,
        client: str,
        deadline: float,
        meter: Meter,
    ):
        loop = asyncio.get_running_loop()
        self.client = client  # who may cancel it
        self._events: asyncio.Queue[tuple[Event, float] | None] = asyncio.Queue()  # None: the deadline has passed
        self._limits, self._meter = limits, meter
        self._cancelled = False  # by the client, not by the engine
        self._late = False

        def listen(before: int, event: Event) -> None:  # in the engine's thread
            event = replace(event, choice=before + event.choice)
            loop.call_soon_threadsafe(self._events.put_nowait, (event, time.perf_counter()))

        self._handles: list[Handle] = []
        self._n = requests[0].n
        self._lengths = [len(request.prompt) for request in requests]
        self._prefilled = [0] * len(requests)
        try:
            for i, request in enumerate(requests):
                listener: Callable[[Event], None] = partial(listen, i * self._n)
                if limits.recorder is not None:
                    listener = limits.recorder.following(request, thread.engine.model.vocabulary, listener)
                self._handles.append(thread.submit(request, client=client, listener=listener))
        except HeadstartError:
            self.cancel()
            raise
        self._alarm = loop.call_at(deadline, self._time_out)

    def cancel(self) -> None:
        self._cancelled = True
        self._cancel_all()

    def _cancel_all(self) -> None:
        for handle in self._handles:
            handle.cancel()

    def close(self) -> None:
        """Release the request, however it ended.

        Cancel what is left, and count it as cancelled unless it was counted before.
        """
        self._alarm.cancel()
        self._meter.end("cancelled")
        self.cancel()

    async def cancel_on_disconnect(self, http: HTTPRequest) -> None:
        await disconnected(http)
        self.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until all choices are finished. Raises if the request fails or takes too long."""
        finish_reasons: list[str] = []
        answers = self._n * len(self._handles)
        while len(finish_reasons) < answers:
            timed = None if self._late else await self._events.get()
            if timed is None:  # events still in the queue are too late
                raise timed_out(self._limits)
            event, when = timed
            prompt = event.choice // self._n
            self._prefilled[prompt] = event.prompt_processed or self._lengths[prompt]
            self._meter.count(event, when, first=event.choice % self._n == 0)
            if event.error is not None:
                self._meter.end("error")
                raise event.error
            if event.finish_reason == "cancelled" and not self._cancelled:
                message = "the server is shutting down: this response is incomplete"
                raise Refusal(503, message, code="shutting_down")
            finish_reasons += [event.finish_reason] if event.finish_reason is not None else []
            if len(finish_reasons) == answers:
                self._meter.end(next((each for each in ("cancelled", "length") if each in finish_reasons), "stop"))
            yield event

    def progress(self) -> tuple[int, int]:
        """Return how many tokens of its prompts have been prefilled, and how many there are."""
        return sum(self._prefilled), sum(self._lengths)

    def _time_out(self) -> None:
        """Free the engine's resources at once, whether or not the events are being read."""
        self._late = True
        self._meter.end("timeout")
        self._cancel_all()
        self._events.put_nowait(None)
