"""Time a decoding step at each depth, without the engine around it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import mlx.core as mx

from ..engine.batch import Batch
from ..engine.step import StepResult, prefill_prompts, step
from ..models import Model

STEPS = 8  # timed per depth and repeat; their median counts
REPEATS = 2  # after one that warms up


@dataclass(frozen=True)
class StepTime:
    k: int
    seconds: float
    ratio: float  # to a step without drafts, within the same repeat


def time_depths(model: Model, prompt: Sequence[int], depths: Sequence[int]) -> list[StepTime]:
    """Time a step of one sequence at each depth, 0 included. Every repeat times all depths, and ratios are taken
    within a repeat, so that a machine that slows down for a while treats all of them alike."""
    depths = sorted({0, *depths})
    times: dict[int, list[float]] = {k: [] for k in depths}
    for _ in range(REPEATS + 1):
        for k in depths:
            times[k].append(step_seconds(model, [prompt], k))
    plain = times[0][1:]
    return [
        StepTime(k, median(times[k][1:]), median(a / b for a, b in zip(times[k][1:], plain, strict=True)))
        for k in depths
    ]


def step_seconds(
    model: Model,
    prompts: Sequence[Sequence[int]],
    k: int,
    advance: Callable[[Model, Batch, int], StepResult] = step,
) -> float:
    """Return the median seconds of a step, with the next step described while one is computed, as in the engine."""
    batch = prefill_prompts(model, prompts, max_k=k)
    finished: list[float] = []
    in_flight: mx.array | None = None
    for _ in range(STEPS + 2):
        round = advance(model, batch, k)
        mx.async_eval(round.tokens, round.accepted, round.finite, *batch.arrays())
        if in_flight is not None:
            mx.eval(in_flight)
            finished.append(time.perf_counter())
        in_flight = round.tokens
    mx.eval(in_flight)
    return median(after - before for before, after in pairwise(finished))
