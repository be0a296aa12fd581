"""What drafts cost: a step by rows and k, and how much of it is verification and how much drafting.

With T(k) the time of a step, β(k) is what the trunk takes for a window of k+1 against a window of one, and δ what one
draft takes against a step of none: T(k) = T(0)·(β(k) + k·δ). A depth pays where a round says more than T(k) / T(0)
tokens; break-even is the acceptance at every position that makes it just so.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import mlx.core as mx

from ..engine.step import step, take_in, verify
from ..models import Model
from ..sampling import Proposal
from .rows import spread

STEPS = 8  # that are timed in a look; the median counts, so that a hiccup does not


@dataclass(frozen=True)
class Cost:
    rows: int
    k: int
    seconds: float  # T(k), a step that drafts k tokens and verifies them
    ratio: float  # T(k) / T(0)
    verify: float  # β(k)
    draft: float | None  # δ; None at k = 0
    break_even: float | None  # None where even k accepted drafts a round do not pay

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_costs(
    model: Model,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int] = (1,),
    ks: Sequence[int] = (0, 1, 2, 3),
    repeats: int = 5,
    progress: Callable[[], None] = lambda: None,
) -> list[Cost]:
    """Every (rows, k) once a repeat, so that a noisy machine shifts all of them alike; then medians of ratios within
    a repeat. `progress` is called after each look, of which there are `looks(rows, ks, repeats)`."""
    ks = sorted({0, *ks})
    times: dict[tuple[int, int, bool], list[float]] = {}
    for repeat in range(repeats + 1):  # the first warms up
        for count in rows:
            for k in ks:
                for drafted in (False, True) if k else (False,):
                    seconds = _seconds(model, spread(prompts, count), k, drafted)
                    progress()
                    if repeat:
                        times.setdefault((count, k, drafted), []).append(seconds)
    return [_cost(times, count, k) for count in rows for k in ks]


def looks(rows: Sequence[int], ks: Sequence[int], repeats: int) -> int:
    return len(rows) * (1 + 2 * len(set(ks) - {0})) * (repeats + 1)


def break_even(k: int, ratio: float) -> float | None:
    """The acceptance a with 1 + a + … + a^k = ratio: what a draft must stand with, given that those before it do."""
    if ratio > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**j for j in range(k + 1)) < ratio:
            low = middle
        else:
            high = middle
    return high


def _cost(times: dict[tuple[int, int, bool], list[float]], rows: int, k: int) -> Cost:
    plain, verified = times[rows, 0, False], times[rows, k, False]
    beta = median(v / p for v, p in zip(verified, plain, strict=True))
    if k == 0:
        return Cost(rows, k, median(plain), 1.0, 1.0, None, None)
    whole = times[rows, k, True]
    ratio = median(w / p for w, p in zip(whole, plain, strict=True))
    delta = median((w - v) / p for w, v, p in zip(whole, verified, plain, strict=True)) / k
    return Cost(rows, k, median(whole), ratio, beta, delta, break_even(k, ratio))


def _seconds(model: Model, prompts: Sequence[Sequence[int]], k: int, drafted: bool) -> float:
    """Seconds a step, one step in flight while the host describes the next, as in the engine."""
    running = take_in(model, prompts, ceiling=k if drafted else 0)
    landed: list[float] = []
    flight: mx.array | None = None
    for turn in range(STEPS + 2):
        round = step(model, running, k) if drafted else verify(model, running, _arbitrary(prompts, k, turn))
        mx.async_eval(round.tokens, round.accepted, round.finite, *running.arrays())
        if flight is not None:
            mx.eval(flight)
            landed.append(time.perf_counter())
        flight = round.tokens
    mx.eval(flight)
    return median(b - a for a, b in pairwise(landed))


def _arbitrary(prompts: Sequence[Sequence[int]], k: int, turn: int) -> Proposal:
    """Drafts that cost nothing: tokens of the prompts, which differ as those of a text do. Experts care."""
    picked = [[prompt[(turn + j) % len(prompt)] for j in range(k)] for prompt in prompts]
    return Proposal(mx.array(picked, mx.int32).reshape(len(prompts), k), [])
