"""Put servers under load: clients that wait for their answers, or Poisson arrivals that do not."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from ..errors import HeadstartError, RequestError
from .client import BenchServer, TimedResponse, send_request
from .plan import Condition, Trial
from .prompts import PromptSource

T = TypeVar("T")
Send = Callable[[int, float], Awaitable[T]]  # a request's number, and when it is due


class LoadTest:
    """Measure servers by name. All requests run on one event loop, so that connections are kept between runs."""

    def __init__(
        self,
        runner: asyncio.Runner,
        servers: Sequence[BenchServer],
        prompts: PromptSource,
        tokens: int = 64,
        requests: int = 16,  # per run; at least two per client
        timeout: float = 120.0,  # seconds without data
    ):
        self.runner = runner
        self.prompts = prompts
        self.tokens = tokens
        self.requests = requests
        names = [server.name for server in servers]
        if len(set(names)) < len(names):
            raise RequestError(f"two servers are called {max(names, key=names.count)}: give --url NAME=URL")
        self.servers = {server.name: server for server in servers}
        self.clients = {server.name: server.client(timeout) for server in servers}

    def __enter__(self) -> "LoadTest":
        """Find each server's model and check that it answers a request."""
        for name in self.servers:
            self.runner.run(self._check(name))
        return self

    def __exit__(self, *error: object) -> None:
        for client in self.clients.values():
            self.runner.run(client.aclose())

    def measure(self, variant: str, condition: Condition, repeat: int) -> Trial:
        return self.runner.run(self._measure(variant, condition, repeat))

    async def _check(self, name: str) -> None:
        self.servers[name] = server = await self.servers[name].with_model(self.clients[name])
        response = await self._send(name, self.prompts.names[0], 0, "check", tokens=8)
        if response.error is not None:
            raise HeadstartError(f"{server.url}, model {server.model}: {response.error}")

    async def _measure(self, name: str, condition: Condition, repeat: int) -> Trial:
        async def send(number: int, due: float) -> TimedResponse:
            return await self._send(name, condition.prompts, number, f"{repeat} {number} {condition}", due=due)

        arrivals = Random(f"{repeat} {condition}")  # the same for every server
        responses = await drive(condition, send, self.requests, arrivals)
        good = [response for response in responses if response.error is None]
        if not good:
            raise HeadstartError(f"{name}: no request succeeded ({condition}): {responses[0].error}")
        proposed, accepted, rounds = (sum(counts) for counts in zip(*(each.drafts for each in good), strict=True))
        return Trial(
            tokens=sum(response.tokens for response in good),
            seconds=max(each.due + each.e2e for each in responses) - min(each.due for each in responses),
            tokens_per_round=sum(each.tokens for each in good if each.stats) / rounds if rounds else None,
            proposed=[proposed],
            accepted=[accepted],
            responses=responses,
            model=self.servers[name].model or "",
        )

    async def _send(
        self, name: str, prompts: str, number: int, key: str, *, tokens: int | None = None, due: float | None = None
    ) -> TimedResponse:
        """Send a prompt that no server gets twice. All servers get the same ones, but those at one URL, which share
        a prefix cache, do not."""
        server = self.servers[name]
        at_url = [each.name for each in self.servers.values() if each.url == server.url]
        prompt = self.prompts.prompt(prompts, number, f"{key} {at_url.index(name)}")
        return await send_request(self.clients[name], server, prompt, tokens or self.tokens, due=due)


async def drive(condition: Condition, send: Send[T], requests: int, rng: Random) -> list[T]:
    """Send requests by the condition's load and return the results in the order of their numbers."""
    loop = asyncio.get_running_loop()
    results: dict[int, T] = {}
    clients = int(condition.value)
    numbers = iter(range(max(requests, 2 * clients)))  # shared by all clients

    async def client() -> None:
        for number in numbers:
            results[number] = await send(number, loop.time())

    async def arrival(number: int, due: float) -> None:
        await asyncio.sleep(due - loop.time())
        results[number] = await send(number, due)

    async with asyncio.TaskGroup() as group:
        if condition.load == "rate":
            due = loop.time()
            for number in range(requests):
                group.create_task(arrival(number, due))
                due += rng.expovariate(condition.value)
        else:
            for _ in range(clients):
                group.create_task(client())
    return [results[number] for number in sorted(results)]
