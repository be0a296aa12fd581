"""The engine for asyncio: any number of coroutines share one batch."""

import asyncio
from collections.abc import AsyncIterator
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..models import Model
from .engine_thread import EngineThread
from .request import Event, Request


class AsyncEngine:
    """An engine in a thread of its own. Use it as `async with AsyncEngine(model, tokenizer) as engine`.

    Concurrent requests are decoded in one batch. Leaving the block waits for running requests.
    """

    def __init__(self, model: Model, tokenizer: TokenizerWrapper | None = None, **engine: Any):
        """Take the arguments of `Engine`."""
        self._thread = EngineThread(model, tokenizer, **engine)

    async def __aenter__(self) -> "AsyncEngine":
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self._thread.close, 0.0 if error is not None else TIMEOUT_MAX)

    async def stream(self, request: Request) -> AsyncIterator[Event]:
        """Yield the events of a request; the last of each answer has a `finish_reason`.

        Leaving the iterator early cancels the request. A request that fails raises its error.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def listener(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        handle = self._thread.submit(request, listener=listener)
        unfinished = request.n
        try:
            while unfinished:
                event = await events.get()
                if event.error is not None:
                    raise event.error
                unfinished -= event.finish_reason is not None
                yield event
        finally:
            handle.cancel()

    async def generate(self, request: Request) -> str:
        """Return the text of a request's first answer."""
        texts = [text async for event in self.stream(request) if event.choice == 0 for text in event.texts]
        return "".join(texts)
