"""Threads that take work off the event loop. Clients take turns at them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from .errors import Refusal

Result = TypeVar("Result")


class ClientPlaces:
    """A semaphore for each client, so that none takes all of what there is."""

    def __init__(self, places: int):
        self._places = places
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # in use

    def __getitem__(self, client: str) -> asyncio.Semaphore:
        return self._semaphores.setdefault(client, asyncio.Semaphore(self._places))


class Threads:
    def __init__(self, count: int, name: str):
        """Create up to `count` threads. One of them is always left to others."""
        self.places = ClientPlaces(count - 1)
        self._executor = ThreadPoolExecutor(count, name)

    def submit(self, function: Callable[[], object]) -> None:
        """Run a function of the server's own in the background."""
        self._executor.submit(function)

    async def run(self, client: str, function: Callable[..., Result], *arguments: object) -> Result:
        """Return what a function returns in a thread. It cannot be stopped, so it must be quick."""
        loop, places = asyncio.get_running_loop(), self.places[client]
        await places.acquire()
        future = self._executor.submit(function, *arguments)

        def done(_: Future[Result]) -> None:  # when it ends, even if the client has left before
            if not loop.is_closed():
                loop.call_soon_threadsafe(places.release)

        future.add_done_callback(done)
        try:
            return await asyncio.wrap_future(future)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust code in a library, which is not an Exception
                raise
            message = f"the request could not be prepared: {str(error)[:500]}"
            raise Refusal(400, message, code="invalid_value") from error

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
