"""One run: rows that begin together decode at one depth. What is counted is the time when all of them decode.

That is from the end of their first round, so that taking in prompts stays out, to the round in which the first row
ends: after it the batch would be a smaller one, and its rounds would be compared with those of a larger.

A machine is fast for some seconds and then slow for some, so runs that are to be compared take turns of half a
second: each goes on where it was, on a watch of its own, and whoever is furthest behind is next.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ..engine import Depth, Engine, Event, Request
from ..errors import RequestError
from ..models import Model
from ..sampling import SamplingParams

K = int | Literal["auto"]
TURN = 0.5  # seconds, and at least a step


@dataclass(frozen=True)
class Run:
    tokens: int  # of all rows
    seconds: float
    rounds: list[tuple[int, int]] = field(repr=False)  # of all rows: drafts accepted, and drafts proposed
    texts: list[list[int]] = field(repr=False)  # everything each row said
    exact: bool = True  # the engine promises the tokens of plain decoding

    @property
    def rate(self) -> float:
        """Tokens a second of the whole batch."""
        return self.tokens / self.seconds


Running = Generator[float, None, Run]  # after every turn: which share of its tokens is said


@dataclass
class Watch:
    """Seconds of one run. It stands still while others have their turns."""

    elsewhere: float = 0.0
    since: float = field(default_factory=time.perf_counter)  # when this turn began

    def read(self) -> float:
        return time.perf_counter() - self.elsewhere

    @property
    def turn_is_over(self) -> bool:
        return time.perf_counter() - self.since > TURN

    def go_on(self, stopped: float) -> float:
        """`stopped`: what it read when the turn ended → for how long it stood still."""
        away = self.read() - stopped
        self.elsewhere += away
        self.since = time.perf_counter()
        return away


def in_turns(running: dict[K, Running], progress: Callable[[float], None] = lambda runs: None) -> dict[K, Run]:
    """All of them to their ends. `progress` is told after every turn how much of a run it was."""
    done: dict[K, Run] = {}
    said = dict.fromkeys(running, 0.0)
    while said:
        behind = min(said, key=said.__getitem__)
        before = said[behind]
        try:
            said[behind] = next(running[behind])
        except StopIteration as end:
            done[behind] = end.value
            del said[behind]
        progress(said.get(behind, 1.0) - before)
    return done


def run(model: Model, prompts: Sequence[Sequence[int]], k: K, tokens: int) -> Run:
    """One run, with nobody to take turns with."""
    return in_turns({k: begin(model, prompts, k, tokens)})[k]


def begin(model: Model, prompts: Sequence[Sequence[int]], k: K, tokens: int) -> Running:
    """Answer each prompt greedily with `tokens` tokens, past any end."""
    # "auto" knows what it learned of this model in its earlier runs, as in a server. Runs at fixed depths have a
    # controller of their own, or they would teach the one that is judged.
    engine = Engine(model, max_rows=len(prompts), depth=None if k == "auto" else Depth())
    heard: list[list[Event]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=tokens, k=k)
    for prompt, events in zip(prompts, heard, strict=True):
        engine.submit(Request(prompt, params), listener=events.append)
    engine.take_in_all()
    _check(heard)
    if len(engine.rows) < len(prompts):
        raise RequestError(f"--rows {len(prompts)}: memory is left for {len(engine.rows)} of them only")
    first: list[int] = []  # events of each row before the clock
    begun = ended = 0.0
    watch = Watch()
    while not ended:
        engine.turn()
        if over := watch.turn_is_over:
            engine.settle()
        now = watch.read()
        if not first and all(events and events[-1].tokens for events in heard):
            begun, first = now, [len(events) for events in heard]
        if any(events and events[-1].finish_reason for events in heard):
            ended = now
        elif over:
            yield min(sum(len(event.tokens) for event in events) for events in heard) / tokens
            engine.skip(watch.go_on(now))
    engine.cancel_all()
    counted = [list(events) for events in heard]
    while engine.turn():
        pass
    _check(heard)
    if not first or ended == begun:
        raise RequestError(f"--tokens {tokens} are over before they can be timed: ask for more")
    told = [pair for events, n in zip(counted, first, strict=True) for pair in pairwise(events[n - 1 :])]
    return Run(
        tokens=sum(len(event.tokens) for _, event in told),
        seconds=ended - begun,
        rounds=[_outcome(before, event) for before, event in told],
        texts=[[token for event in events for token in event.tokens] for events in heard],
        exact=all(event.stats is not None and event.stats.exact for _, event in told),
    )


def _check(heard: list[list[Event]]) -> None:
    for event in (events[-1] for events in heard if events):
        if event.error is not None:
            raise event.error


def _outcome(before: Event, event: Event) -> tuple[int, int]:
    """Stats add up; what a round added is the difference."""
    old, new = before.stats, event.stats
    assert old is not None
    assert new is not None
    return (
        new.accepted_draft_tokens - old.accepted_draft_tokens,
        new.proposed_draft_tokens - old.proposed_draft_tokens,
    )
