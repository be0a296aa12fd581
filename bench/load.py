"""Put servers with OpenAI's API under load, in one interleaved run, and report what their clients see.

    python bench/load.py --url http://127.0.0.1:8000 --concurrency 1,4,16
    python bench/load.py --url "off=http://127.0.0.1:8000#num_draft_tokens=0" --url auto=http://127.0.0.1:8000
    python bench/load.py --url http://127.0.0.1:8000 --rate 0.5,1,2 --prompts short --requests 100

Clients wait for their answers (--concurrency), or arrive at random and do not (--rate). The first server is the
baseline of all ratios. The key in HEADSTART_API_KEY is sent to the first server, unless --api-key is given.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePath
from random import Random
from secrets import token_hex
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))  # for bench.*, whether this is run or imported

from bench.client import BenchServer, TimedResponse, send_request
from bench.load_report import LoadReport, LoadTrial, summarise_load
from headstart.bench.plan import INTERRUPTED, BenchPlan, Condition, LoadKind, run_plan
from headstart.bench.prompts import BenchPrompt, builtin_prompts, prompts_by_kind
from headstart.bench.system import system_info
from headstart.cli.progress import Progress
from headstart.cli.show import check_output, print_report
from headstart.errors import HeadstartError, RequestError

LENGTHS = {"short": 50, "medium": 400, "long": 1600}  # words of made-up prompts

T = TypeVar("T")
Send = Callable[[int, float], Awaitable[T]]  # a request's number, and when it is due


@dataclass(frozen=True)
class PromptSource:
    """Prompts by name. Made-up ones begin with a key that never occurred before, so that a prefix cache cannot help
    by chance."""

    given: Mapping[str, Sequence[BenchPrompt]] = field(default_factory=dict)  # by kind, sent as they are
    words: Mapping[str, int] = field(default_factory=dict)  # length of made-up prompts, by name
    salt: str = field(default_factory=token_hex)  # servers may still cache the prompts of an earlier benchmark

    @classmethod
    def parse(cls, text: str) -> "PromptSource":
        """Return the prompts that `--prompts` names: lengths, numbers of words, kinds, or files."""
        words = {}
        others = []
        for name in text.split(","):
            if name in LENGTHS:
                words[name] = LENGTHS[name]
            elif name.isdecimal() and int(name):
                words[f"{name} words"] = int(name)
            else:
                others.append(name)
        return cls(prompts_by_kind(others), words)

    @property
    def names(self) -> list[str]:
        return [*self.given, *self.words]

    def prompt(self, name: str, number: int, key: str = "") -> BenchPrompt:
        """Return prompt `number` of a name. A made-up one differs by `key`."""
        if name in self.given:
            return self.given[name][number % len(self.given[name])]
        questions = _questions()
        question = questions[number % len(questions)]
        filler = self._filler(f"{name} {number} {key}", self.words[name] - len(question.split()))
        return BenchPrompt(kind=name, text=f"{filler}\n\n{question}")

    def _filler(self, key: str, words: int) -> str:
        """Return sentences in random order, after a number that no other key has."""
        rng = Random(f"{self.salt} {key}")
        text = [f"({rng.randbytes(4).hex()})"]
        while len(text) < words:
            text += rng.choice(_sentences()).split()
        return " ".join(text[: max(words, 1)])


@cache
def _sentences() -> list[str]:
    return [f"{part.strip(' .')}." for each in builtin_prompts(["prose"]) for part in each.text.split(". ")]


@cache
def _questions() -> list[str]:
    return [each.messages[-1]["content"] for each in builtin_prompts(["chat"])]


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

    @property
    def models(self) -> dict[str, str]:
        """Return the model of each server. Some servers call a model by its folder, which is private."""
        models = {name: PurePath(server.model or "") for name, server in self.servers.items()}
        return {name: model.name if model.is_absolute() else str(model) for name, model in models.items()}

    def __enter__(self) -> "LoadTest":
        """Find each server's model and check that it answers a request."""
        for name in self.servers:
            self.runner.run(self._check(name))
        return self

    def __exit__(self, *error: object) -> None:
        for client in self.clients.values():
            self.runner.run(client.aclose())

    def measure(self, variant: str, condition: Condition, repeat: int) -> LoadTrial:
        return self.runner.run(self._measure(variant, condition, repeat))

    async def _check(self, name: str) -> None:
        self.servers[name] = server = await self.servers[name].with_model(self.clients[name])
        response = await self._send(name, self.prompts.names[0], 0, "check", tokens=8)
        if response.error is not None:
            raise HeadstartError(f"{server.url}, model {server.model}: {response.error}")

    async def _measure(self, name: str, condition: Condition, repeat: int) -> LoadTrial:
        async def send(number: int, due: float) -> TimedResponse:
            return await self._send(name, condition.prompts, number, f"{repeat} {number} {condition}", due=due)

        arrivals = Random(f"{repeat} {condition}")  # the same for every server
        trial = LoadTrial(await drive(condition, send, self.requests, arrivals))
        if not trial.good:
            raise HeadstartError(f"{name}: no request succeeded ({condition}): {trial.responses[0].error}")
        return trial

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


def with_keys(servers: Sequence[BenchServer], keys: Sequence[str]) -> list[BenchServer]:
    """Give servers their keys, in the order of their URLs. The key in the environment is our own server's: no other
    server may see it. It may hold several keys."""
    keys = keys or os.environ.get("HEADSTART_API_KEY", "").split()[:1]
    by_url = dict(zip(dict.fromkeys(server.url for server in servers), keys, strict=False))
    return [replace(server, key=by_url.get(server.url)) for server in servers]


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def loads(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise ValueError
    return values


def run_load(arguments: Sequence[str] | None = None) -> LoadReport:
    """Measure what the command line says, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True, help="[NAME=]URL[#FIELD=VALUE&…]; repeat to compare")
    parser.add_argument("--model", help="the model's name, if a server has several")
    parser.add_argument("--api-key", action="append", default=[], help="in the order of the servers")
    parser.add_argument("--prompts", default="short,medium,long", help="also numbers of words, kinds, or files")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=loads, default=[1, 4, 16], help="clients that each wait")
    load.add_argument("--rate", type=loads, help="Poisson arrivals per second instead")
    parser.add_argument("--requests", type=positive, default=16, help="per run, at least two per client")
    parser.add_argument("--tokens", type=positive, default=64, help="most tokens of an answer")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--completions", action="store_true", help="complete texts instead of chatting")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for data")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", type=Path, help="also write the report: JSON to a .json, else Markdown")
    args = parser.parse_args(arguments)
    check_output(args.output)
    prompts = PromptSource.parse(args.prompts)
    servers = [BenchServer.parse(url, model=args.model, chat=not args.completions) for url in args.url]
    kind: LoadKind = "rate" if args.rate else "concurrency"
    values = args.rate or args.concurrency
    plan = BenchPlan([each.name for each in servers], prompts.names, kind, values, args.tokens, args.repeats)
    servers = with_keys(servers, args.api_key)
    with (
        asyncio.Runner() as runner,
        LoadTest(runner, servers, prompts, args.tokens, args.requests, args.timeout) as test,
        Progress(plan.runs, "runs") as progress,
    ):
        print(f"Measuring {plan}.", file=sys.stderr)
        trials, stopped = run_plan(plan, test.measure, progress.begin)
    report = LoadReport(test.models, system_info(), plan, summarise_load(plan, trials), stopped)
    print_report(report, args.json, args.output)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 after an error, 130 after Ctrl-C."""
    try:
        report = run_load(arguments)
    except KeyboardInterrupt:
        return 130
    except HeadstartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if report.stopped not in (None, INTERRUPTED):
        print(f"error: not complete: {report.stopped}", file=sys.stderr)
        return 1
    return 130 if report.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
