"""When requests are sent: by clients that wait for their answers, or by a public that does not."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

T = TypeVar("T")
Send = Callable[[int, float], Awaitable[T]]  # a request's number, and when it is due


@dataclass(frozen=True)
class Closed:
    """So many clients, each of which asks again once it is answered. A slow server is asked less."""

    clients: int

    def __str__(self) -> str:
        return f"{self.clients} at a time"

    def least(self) -> int:
        """Requests without which it would not be what it says."""
        return 2 * self.clients


@dataclass(frozen=True)
class Open:
    """Poisson arrivals, so many a second, whether or not the server keeps up."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g} a second"

    def least(self) -> int:
        return 1


Load = Closed | Open


async def drive(load: Load, send: Send[T], count: int, rng: Random) -> list[T]:
    """Results by the requests' numbers."""
    if isinstance(load, Closed):
        return await _closed(load.clients, send, count)
    return await _open(load.rate, send, count, rng)


async def _closed(clients: int, send: Send[T], count: int) -> list[T]:
    loop, numbers, results = asyncio.get_running_loop(), iter(range(count)), dict[int, T]()

    async def client() -> None:
        for number in numbers:
            results[number] = await send(number, loop.time())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [results[number] for number in range(count)]


async def _open(rate: float, send: Send[T], count: int, rng: Random) -> list[T]:
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[T]]()

    async def at(number: int, due: float) -> T:
        await asyncio.sleep(due - loop.time())
        return await send(number, due)

    due = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            tasks.append(group.create_task(at(number, due)))
            due += rng.expovariate(rate)
    return [task.result() for task in tasks]
