"""Servers under load, one after the other in every repeat.

A machine is never twice the same. So each repeat takes all servers through a cell one behind the other, in a new
order, and what is compared later are ratios within a repeat.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

import httpx

from ...errors import HeadstartError, RequestError
from .answer import Answer
from .arrivals import Closed, Load, drive
from .ask import Count, ask
from .questions import Asking, Questions, is_hit
from .target import Target

FEWEST = 8  # tokens of an answer: with less there is nothing between them to time


@dataclass(frozen=True)
class Cell:
    prompts: str  # by length or kind
    load: Load
    hits: float  # share of prompts whose beginning the server has read

    def __str__(self) -> str:
        return f"{self.prompts}, {self.load}, {self.hits:.0%} hits"


@dataclass(frozen=True)
class Run:
    """One server, one cell, once."""

    target: str
    model: str
    cell: Cell
    repeat: int
    answers: list[Answer]

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def seconds(self) -> float:
        return max(answer.ended for answer in self.answers) - min(answer.asked for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens a second of all requests together."""
        return sum(answer.tokens for answer in self.good) / self.seconds


@dataclass(frozen=True)
class Plan:
    targets: Sequence[Target]
    questions: Questions
    loads: Sequence[Load] = (Closed(1),)
    hits: Sequence[float] = (0.0,)
    tokens: int = 64  # of every answer, at most
    requests: int = 16  # of a run, at least
    repeats: int = 5
    timeout: float = 120.0  # seconds without a sign

    def __post_init__(self) -> None:
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise RequestError(f"two servers are called {max(names, key=names.count)}: tell them apart with --names")
        if self.tokens < FEWEST:
            raise RequestError(
                f"--tokens is {self.tokens}; give {FEWEST} or more, or nothing is between them to time"
            )
        if self.repeats < 1 or self.requests < 1:
            raise RequestError("--repeats and --requests must be 1 or more")
        for load in self.loads:
            if (load.clients if isinstance(load, Closed) else load.rate) <= 0:
                raise RequestError(f"--{'concurrency' if isinstance(load, Closed) else 'rate'} must be above 0")
        if not all(0 <= share <= 1 for share in self.hits):
            raise RequestError("--hits are shares, from 0 to 1")
        if self.questions.given and any(self.hits):
            raise RequestError(
                "--hits need prompts that are made up: leave out --prompts, which are sent as they are"
            )

    @property
    def cells(self) -> list[Cell]:
        return [Cell(name, load, hits) for name in self.questions.names for hits in self.hits for load in self.loads]

    @property
    def count(self) -> int:
        """Runs, those included that only warm up."""
        return (self.repeats + 1) * len(self.cells) * len(self.targets)

    def requests_of(self, cell: Cell) -> int:
        return max(self.requests, cell.load.least())

    def variant(self, target: Target) -> int:
        """Which of those at one address it is."""
        return [each.name for each in self.targets if each.url == target.url].index(target.name)


async def measure(plan: Plan, count: Count | None = None) -> AsyncIterator[Run | None]:
    """Runs as they end, None for those that only warmed up. Ends with an error when a server has stopped answering:
    what came until then stands."""
    async with AsyncExitStack() as stack:
        servers: list[tuple[Target, httpx.AsyncClient]] = []
        for target in plan.targets:
            http = await stack.enter_async_context(target.client(plan.timeout))
            servers.append((await _ready(plan, target, http), http))
        rng = Random(0)
        for repeat in range(-1, plan.repeats):
            for cell in plan.cells:
                for target, http in rng.sample(servers, len(servers)):
                    run = await _run(plan, target, http, cell, repeat, count)
                    if not run.good:
                        raise HeadstartError(
                            f"{target.name}: no request was answered ({cell}): {run.answers[0].error}"
                        )
                    yield run if repeat >= 0 else None


async def _ready(plan: Plan, target: Target, http: httpx.AsyncClient) -> Target:
    """The target with its model's name, once it has answered something."""
    target = await target.found(http)
    asking = Asking(-2, 0, "first", plan.variant(target))
    name = plan.questions.names[0]
    answer = await ask(http, target, plan.questions.prompt(name, asking, hit=False), FEWEST)
    if answer.error is not None:
        raise HeadstartError(f"{target.url}, model {target.model}: {answer.error}")
    return target


async def _run(
    plan: Plan, target: Target, http: httpx.AsyncClient, cell: Cell, repeat: int, count: Count | None
) -> Run:
    variant = plan.variant(target)
    if cell.hits:
        await ask(http, target, plan.questions.ahead(cell.prompts), 1)

    async def send(number: int, due: float) -> Answer:
        asking = Asking(repeat, number, str(cell), variant)
        prompt = plan.questions.prompt(cell.prompts, asking, hit=is_hit(number, cell.hits))
        return await ask(http, target, prompt, plan.tokens, asked=due, count=count)

    arrivals = Random(f"{repeat} {cell}")  # the same for every server
    answers = await drive(cell.load, send, plan.requests_of(cell), arrivals)
    return Run(target.name, target.model or "", cell, repeat, answers)
