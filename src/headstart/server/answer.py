"""A request under way, seen from the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator

from ..engine import EngineThread, Event, Request
from .errors import Refusal
from .limits import Deadline
from .metrics import Meter


class Answer:
    """The events of a request, as the engine's thread tells them. The engine never waits for who reads them."""

    def __init__(self, room: EngineThread, request: Request, *, client: str, deadline: Deadline, meter: Meter):
        loop = asyncio.get_running_loop()
        self.client = client  # who may cancel it
        self._events: asyncio.Queue[tuple[Event, float] | None] = asyncio.Queue()  # None: look at the clock
        self._deadline, self._meter = deadline, meter
        self._cancelled = False  # by someone here, and not by the room
        self._late = False

        def tell(event: Event) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(self._events.put_nowait, (event, time.perf_counter()))

        self._handle = room.submit(request, client=client, listener=tell)
        self._alarm = loop.call_at(deadline.at, self._end_late)

    def cancel(self) -> None:
        self._cancelled = True
        self._handle.cancel()

    def close(self) -> None:
        """Nobody listens any more."""
        self._alarm.cancel()
        self._meter.end("cancelled")
        self.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """To the last one of the last answer. A request that fails, or takes too long, raises."""
        answers = left = self._handle.request.n
        while left:
            told = None if self._late else await self._events.get()
            if told is None:  # what else has been said comes too late
                raise self._deadline.missed()
            event, when = told
            self._meter.count(event, when, answers)
            if event.error is not None:
                raise event.error
            if event.finish_reason == "cancelled" and not self._cancelled:
                raise Refusal(503, "the server is shutting down: this answer is not whole", code="shutting_down")
            left -= event.finish_reason is not None
            yield event

    def _end_late(self) -> None:
        """The row is freed at once, whether or not anybody reads what it said."""
        self._late = True
        self._meter.end("timeout")
        self._handle.cancel()
        self._events.put_nowait(None)
