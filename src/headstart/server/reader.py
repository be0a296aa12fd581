"""Prompts are read one after another in a thread of their own, so that a long one does not hold up the streams."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request as HTTPRequest

from ..errors import Busy
from .deadline import Deadline
from .errors import Refusal

Result = TypeVar("Result")


class Reader:
    def __init__(self, most: int | None):
        """So many may wait while another is read."""
        self._most, self._inside = most, 0
        self._thread = ThreadPoolExecutor(1, "reader")

    async def read(self, work: Callable[[], Result], http: HTTPRequest, deadline: Deadline) -> Result:
        """What `work` makes of a prompt. It is not begun if its client goes, or its time is up, before its turn."""
        if self._most is not None and self._inside > self._most:
            raise Busy(f"{self._most} prompts wait to be read already: try again in a moment", retry_after=1)
        loop = asyncio.get_running_loop()
        reading, gone = loop.run_in_executor(self._thread, work), asyncio.create_task(disconnected(http))
        self._inside += 1
        try:
            left = max(0.0, deadline.at - loop.time())
            await asyncio.wait((reading, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            raise Refusal(499, "the client has gone", code="gone") if gone.done() else deadline.missed()
        finally:
            self._inside -= 1
            reading.cancel()
            gone.cancel()


async def disconnected(http: HTTPRequest) -> None:
    """Returns when the client goes. Its body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
