"""One run: rows that begin together decode at one depth. What is counted is the time when all of them decode.

That is from the end of their first round, so that taking in prompts stays out, to the round in which the first row
ends: after it the batch would be a smaller one, and its rounds would be compared with those of a larger.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from ..engine import Depth, Engine, Event, Request
from ..errors import RequestError
from ..models import Model
from ..sampling import SamplingParams

K = int | Literal["auto"]


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


def run(model: Model, prompts: Sequence[Sequence[int]], k: K, tokens: int) -> Run:
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
    while not ended:
        engine.turn()
        now = time.perf_counter()
        if not first and all(events and events[-1].tokens for events in heard):
            begun, first = now, [len(events) for events in heard]
        if any(events and events[-1].finish_reason for events in heard):
            ended = now
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
