"""An engine that runs in the device's thread, and the engine for asyncio on top of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from threading import TIMEOUT_MAX
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import Busy, EngineDown, RequestError, check_type
from ..limits import MAX_K
from ..models import Model
from .device_thread import DeviceThread
from .engine import Engine
from .request import Event, Handle, Request


@dataclass(frozen=True)
class Settings:
    """Settings that can be changed at run time. They apply to new requests."""

    speculation: bool = True
    max_k: int = MAX_K

    def __post_init__(self) -> None:
        if not isinstance(self.speculation, bool):
            raise RequestError(f"speculation is {self.speculation!r}; it must be true or false")
        if not isinstance(self.max_k, int) or isinstance(self.max_k, bool) or not 0 <= self.max_k <= MAX_K:
            raise RequestError(f"max_k is {self.max_k!r}; it must be a whole number from 0 to {MAX_K}")


class EngineThread:
    """An engine that runs in a thread of its own. Use it as `with EngineThread(Engine(model, tokenizer)) as engine`.

    Any thread may call `submit`, or `generate` and `stream_generate` with `engine=engine`; their requests are decoded
    in one batch. Leaving the block waits for running requests.
    """

    def __init__(self, engine: Engine, device: DeviceThread | None = None):
        """Run an engine in a thread of its own, or in one that runs others too."""
        check_type(engine, Engine, "engine", "make one with headstart.Engine(model, tokenizer)")
        engine.threaded = True
        self.engine = engine
        self.settings = Settings(max_k=engine.model.most_drafts)
        self.device = device or DeviceThread()
        self.device.add(engine)

    def __enter__(self) -> "EngineThread":
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(0.0 if error is not None else TIMEOUT_MAX)

    @property
    def healthy(self) -> bool:
        return self.device.healthy

    @property
    def running(self) -> int:
        return len(self.engine.scheduler.running.sequences)

    @property
    def prefilling(self) -> int:
        return len(self.engine.scheduler.prefilling)

    @property
    def queued(self) -> int:
        return len(self.engine.scheduler.queue)

    def start(self) -> None:
        self.device.start()

    def warm_up(self) -> None:
        """Do the measurements that the first request would otherwise wait for, and start the thread.

        They are done in that thread: mlx keeps what it compiled by thread.
        """
        self.start()
        self.device.call(self.engine.warm_up).result()

    def submit(
        self, request: Request, *, client: str = "", listener: Callable[[Event], None] | None = None
    ) -> Handle:
        """Queue a request, from any thread. `listener` is called in the engine's thread; without one, iterate the
        handle.

        Raises:
            RequestError: It can never be answered.
            Busy: The queue is full, or the engine is closing.
            EngineDown: The engine is not running.
        """
        device = self.device
        if device.closing:
            raise Busy("the server is shutting down", retry_after=5)
        if not device.healthy:
            raise EngineDown(f"the engine is down ({device.problem or 'it was not started'}): start it again")
        limit = self.settings.max_k if self.engine.model.most_drafts else MAX_K  # otherwise there are copies
        max_k = limit if self.settings.speculation else 0
        handle = self.engine.submit(request, client=client, listener=listener, max_k=max_k)
        device.wake(self.engine)  # it may have stopped since the checks above
        return handle

    def configure(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)

    def close(self, deadline: float) -> None:
        """Refuse new requests, wait up to `deadline` seconds for the running ones, and cancel the rest."""
        self.device.close(deadline)


class AsyncEngine:
    """The engine for asyncio. Use it as `async with AsyncEngine(model, tokenizer) as engine`.

    Concurrent requests are decoded in one batch. Leaving the block waits for running requests.
    """

    def __init__(self, model: Model, tokenizer: TokenizerWrapper | None = None, **engine: Any):
        """Take the arguments of `Engine`."""
        self._thread = EngineThread(Engine(model, tokenizer, **engine))

    async def __aenter__(self) -> "AsyncEngine":
        self._thread.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
