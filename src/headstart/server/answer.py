"""A request under way, seen from the event loop."""

import asyncio
import time
from collections.abc import AsyncIterator

from ..engine import Event, Request, Room
from .errors import Refusal
from .metrics import Meter


class Answer:
    """The events of a request, as the engine's thread tells them. The engine never waits for who reads them."""

    def __init__(self, room: Room, request: Request, *, client: str, seconds: float, meter: Meter):
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Event, float]] = asyncio.Queue()
        self._seconds, self._deadline = seconds, loop.time() + seconds
        self._meter = meter
        self._cancelled = False  # by someone here, and not by the room

        def tell(event: Event) -> None:  # in the engine's thread
            loop.call_soon_threadsafe(self._events.put_nowait, (event, time.perf_counter()))

        self._handle = room.submit(request, client=client, listener=tell)

    def cancel(self) -> None:
        self._cancelled = True
        self._handle.cancel()

    def close(self) -> None:
        """Nobody listens any more."""
        self._meter.end("cancelled")
        self.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """To the last one of the last answer. A request that fails, or takes too long, raises."""
        left = self._handle.request.n
        while left:
            try:
                async with asyncio.timeout_at(self._deadline):
                    event, when = await self._events.get()
            except TimeoutError:
                self._meter.end("timeout")
                message = f"no end after {self._seconds:g} seconds: ask for fewer tokens"
                # The client's library would ask for the same again.
                raise Refusal(408, message, code="timeout", headers={"x-should-retry": "false"}) from None
            self._meter.count(event, when)
            if event.error is not None:
                raise event.error
            if event.finish_reason == "cancelled" and not self._cancelled:
                raise Refusal(503, "the server is shutting down: this answer is not whole", code="shutting_down")
            left -= event.finish_reason is not None
            yield event
