"""Put servers under load: clients that wait for their answers, or Poisson arrivals that do not."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from ..errors import HeadstartError, RequestError
from .plan import Condition, Load, Trial
from .prompts import PromptSource
from .server import BenchServer
from .stream import TimedResponse, send_request

T = TypeVar("T")
Send = Callable[[int, float], Awaitable[T]]  # a request's number, and when it is due


@dataclass(frozen=True)
class Workload:
    prompts: PromptSource
    tokens: int = 64
    requests: int = 16  # per run; at least two per client
    cached: float = 0.0  # share of requests whose prompt begins with one that the server has prefilled
    timeout: float = 120.0  # seconds without data

    def __post_init__(self) -> None:
        if self.cached and self.prompts.given:
            raise RequestError("--cached needs made-up prompts: give --prompts lengths, such as short or 400")


class LoadTest:
    """Measure servers by name. All requests run on one event loop, so that connections are kept between runs."""

    def __init__(self, runner: asyncio.Runner, servers: Sequence[BenchServer], workload: Workload):
        self.runner = runner
        self.workload = workload
        names = [server.name for server in servers]
        if len(set(names)) < len(names):
            raise RequestError(f"two servers are called {max(names, key=names.count)}: give --url NAME=URL")
        self.servers = {server.name: server for server in servers}
        self.clients = {server.name: server.client(workload.timeout) for server in servers}

    def __enter__(self) -> "LoadTest":
        """Find each server's model and see that it answers a request."""
        for server in list(self.servers.values()):
            self.runner.run(self._check(server))
        return self

    def __exit__(self, *error: object) -> None:
        for client in self.clients.values():
            self.runner.run(client.aclose())

    def measure(self, variant: str, condition: Condition, repeat: int) -> Trial:
        return self.runner.run(self._measure(self.servers[variant], condition, repeat))

    async def _check(self, server: BenchServer) -> None:
        http, source = self.clients[server.name], self.workload.prompts
        server = self.servers[server.name] = await server.with_model(http)
        prompt = source.prompt(source.names[0], 0, f"check {self._variant(server)}")
        response = await send_request(http, server, prompt, 8)
        if response.error is not None:
            raise HeadstartError(f"{server.url}, model {server.model}: {response.error}")

    async def _measure(self, server: BenchServer, condition: Condition, repeat: int) -> Trial:
        http, workload = self.clients[server.name], self.workload
        if workload.cached:
            await send_request(http, server, workload.prompts.shared_prefix(condition.prompts), 1)

        async def send(number: int, due: float) -> TimedResponse:
            # Every server gets the same prompts, and none gets the same prompt twice.
            key = f"{repeat} {number} {condition} {self._variant(server)}"
            cached = _is_cached(number, workload.cached)
            prompt = workload.prompts.prompt(condition.prompts, number, key, cached=cached)
            return await send_request(http, server, prompt, workload.tokens, due=due)

        arrivals = Random(f"{repeat} {condition}")  # the same for every server
        responses = await drive(condition.load, send, workload.requests, arrivals)
        good = [response for response in responses if response.error is None]
        if not good:
            raise HeadstartError(f"{server.name}: no request succeeded ({condition}): {responses[0].error}")
        rounds = sum(response.rounds for response in good)
        return Trial(
            tokens=sum(response.tokens for response in good),
            seconds=max(response.ended for response in responses) - min(response.due for response in responses),
            tokens_per_round=sum(each.tokens for each in good if each.rounds) / rounds if rounds else None,
            proposed=[sum(response.proposed for response in good)],
            accepted=[sum(response.accepted for response in good)],
            responses=responses,
            model=server.model or "",
        )

    def _variant(self, server: BenchServer) -> int:
        """Return which of the servers at one URL this is: they share a prefix cache."""
        return [name for name, each in self.servers.items() if each.url == server.url].index(server.name)


async def drive(load: Load, send: Send[T], requests: int, rng: Random) -> list[T]:
    """Send requests as the load says and return the results in the order of their numbers."""
    loop = asyncio.get_running_loop()
    results: dict[int, T] = {}
    if load.kind == "rate":
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for number in range(requests):
                group.create_task(_send_at(due, number, send, results))
                due += rng.expovariate(load.value)
    else:
        clients = int(load.value)
        numbers = iter(range(max(requests, 2 * clients)))

        async def client() -> None:
            for number in numbers:
                results[number] = await send(number, loop.time())

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
    return [results[number] for number in sorted(results)]


async def _send_at(due: float, number: int, send: Send[T], results: dict[int, T]) -> None:
    await asyncio.sleep(due - asyncio.get_running_loop().time())
    results[number] = await send(number, due)


def _is_cached(number: int, share: float) -> bool:
    """Spread evenly: of the first n requests, share · n are cached, give or take one."""
    return int((number + 1) * share + 1e-9) > int(number * share + 1e-9)
