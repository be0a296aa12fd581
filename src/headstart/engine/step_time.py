"""Estimate how long a decode step takes, by batch size n, depth k and source of drafts.

log(seconds) = pace + level(n, k). The pace is the machine's speed right now: a busy or hot machine slows every step
alike. The level is what n and k cost beside each other. A pair (n, k) that was timed has a level of its own; any
other follows a linear model, fixed + sequence·n + draft·k + position·n·k, shifted to the nearest depth that was
timed with n sequences. `draft` depends on the source; steps of copies alone have none, and a block costs the same
for any k.

While one depth runs on, an unexpected timing is put down to the pace. Only the steps just after a change of depth
compare two depths at one pace, so only those change the levels.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..models import Model
from .batch import Batch
from .draft import Source, draft_limits
from .step import prefill_prompts, step

SMOOTHING = 0.25  # share of a surprise that the pace takes up, and the resume cost
CLIP = 0.35  # largest surprise that counts, as a logarithm: one outlier must not rule a depth out
COMPARED = 4  # steps after a change of depth, the first not timed, that compare it with the depth before
FADING = 0.992  # weight that earlier timings of a pair keep per step: what drafts cost may drift
# Before anything was timed: fixed, sequence, draft, draft of the reduced head, block of drafts, position.
INITIAL_MODEL = (0.6, 0.15, 0.06, 0.05, 0.1, 0.1)

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]
CHAINS = (Source.HEAD, Source.ASSISTANT)  # a pass for every draft; a model has one of them
DEEPER = (3, 7)  # depths timed besides 0 and 1
COPIED = 7  # depth at which a step of copies alone is timed
CALIBRATION_BATCH = 4  # sequences timed besides 1; the linear model gives any other number
STEPS = 3  # timed together
BUDGET = 0.5  # seconds after which nothing more is timed, once k = 0 and 1 of one sequence are
WARM_UP_BUDGET = 4.0  # the same for a server that has no request yet: enough to time everything twice


class Cell(NamedTuple):
    """A kind of step."""

    n: int  # sequences
    k: int
    source: int = Source.HEAD  # at k = 0 without meaning


@dataclass
class Timing:
    """What was measured of one cell."""

    level: float
    weight: float  # number of timings it stands for, as of `step`
    step: int = 0


class StepTime:
    """Running estimates of step times. It reads no clock: `observe` is given the seconds."""

    def __init__(self) -> None:
        self.timings: dict[int, dict[Cell, Timing]] = {}  # by n
        self._estimates: dict[Cell, tuple[Timing, float, float]] = {}  # by cell, until another is timed: see `_level`
        self.resume = 0.0  # log of how much longer the first step with drafts after a pause takes
        self._pace = 0.0
        self._model = list(INITIAL_MODEL)
        self._last: Cell | None = None  # the step before, if it was timed
        self._repeats = 0  # steps for which that has been the same
        self._steps = 0

    def calibrate(self, seconds: Mapping[Any, Sequence[float]]) -> None:
        """Start from timings taken one after the other; the shortest of each cell counts."""
        logs = {Cell(*each): math.log(min(times)) for each, times in seconds.items()}
        first = min(logs)
        self._pace = logs[first] - self._modelled(first)
        for _ in range(200):  # half corrections, over and over, converge on a small relative error
            for cell, log in logs.items():
                self._correct_model(cell, 0.5 * (log - self._pace - self._modelled(cell)))
        for each, times in seconds.items():
            cell = Cell(*each)
            self.timings.setdefault(cell.n, {})[cell] = Timing(logs[cell] - self._pace, len(times))
        self._estimates.clear()

    def seconds(self, n: int, k: int, source: int = Source.HEAD) -> float:
        """Return the estimated seconds of a step of n sequences with k drafts each."""
        return math.exp(self._pace + self._level(Cell(n, k, source if k else Source.HEAD)))

    def observe(self, n: int, k: int, seconds: float | None, source: int = Source.HEAD) -> None:
        """Learn from a step that took `seconds`; None if its time is not known.

        The first step at another depth also pays for what the depth before left over (drafts to drop, tokens the
        head has not seen), so it only updates the cost of resuming.
        """
        before, cell = self._last, Cell(n, k, source if k else Source.HEAD)
        self._last = cell if seconds is not None else None
        self._steps += 1
        self._repeats = self._repeats + 1 if before == cell else 1
        if seconds is None:
            return
        if self._repeats == 1:
            if k and source and before == Cell(n, 0):
                self.resume += SMOOTHING * (_clipped(math.log(seconds / self.seconds(n, k, source))) - self.resume)
            return
        if not self.timings:
            self._pace = math.log(seconds) - self._modelled(cell)
        surprise = _clipped(math.log(seconds) - self._pace - self._level(cell))
        if self._repeats <= COMPARED:
            timed = self.timings.setdefault(n, {})
            if cell not in timed:
                timed[cell] = Timing(self._level(cell), 0.0)
                self._estimates.clear()
            timing = timed[cell]
            timing.weight = 1 + timing.weight * FADING ** (self._steps - timing.step)
            timing.step = self._steps
            timing.level += surprise / timing.weight
        self._pace += SMOOTHING * surprise

    def _level(self, cell: Cell) -> float:
        """Return the level of the nearest cell that was timed, with what the model says lies between the two."""
        if cell not in self._estimates:
            timed = self.timings.get(cell.n)
            if not timed:
                return self._modelled(cell)
            nearest = min(timed, key=lambda other: (other.source != cell.source, abs(other.k - cell.k), other))
            self._estimates[cell] = timed[nearest], self._modelled(cell), self._modelled(nearest)
        timing, modelled, nearby = self._estimates[cell]
        return timing.level + modelled - nearby

    def _modelled(self, cell: Cell) -> float:
        return math.log(sum(term * x for term, x in zip(self._model, _factors(cell), strict=True)))

    def _correct_model(self, cell: Cell, surprise: float) -> None:
        """Raise the model's level of a cell by `surprise`, each term by its share in the step."""
        total = math.exp(self._modelled(cell))
        shares = [term * x / total for term, x in zip(self._model, _factors(cell), strict=True)]
        rate = surprise / sum(share * share for share in shares)
        self._model = [term * math.exp(rate * share) for term, share in zip(self._model, shares, strict=True)]


def _factors(cell: Cell) -> tuple[int, ...]:
    """Return what the terms of the linear model are multiplied with."""
    drafts = [cell.k * (cell.source in each) for each in (CHAINS, (Source.REDUCED,))]
    return 1, cell.n, *drafts, int(cell.source == Source.BLOCK and cell.k > 0), cell.n * cell.k


def _clipped(surprise: float) -> float:
    return min(max(surprise, -CLIP), CLIP)


def time_steps(model: Model, max_k: int, max_sequences: int, budget: float = BUDGET) -> dict[Cell, list[float]]:
    """Measure steps before a model's first answer, and return seconds per step by cell, once per measurement.

    Takes about `budget` seconds. To learn this while a user waits would cost a short answer more than drafts save.
    """
    started = time.perf_counter()
    tokens = [token % model.vocabulary for token in PROMPT]
    prompts = [tokens[i:] + tokens[:i] for i in range(CALIBRATION_BATCH)]  # different ones use more MoE experts
    batched = min(CALIBRATION_BATCH, max_sequences)
    copied = [Cell(1, COPIED, Source.NONE)] if model.copies else []
    plan = [Cell(1, 0), *copied, Cell(batched, 0)]
    limits = {source: min(most, max_k) for source, most in draft_limits(model).items() if max_k}
    for chain in (each for each in CHAINS if limits.get(each)):
        plan = [Cell(1, 0), Cell(1, 1, chain), *plan, Cell(batched, 1, chain)]
        plan += [Cell(1, k, chain) for k in DEEPER if k <= limits[chain]]
    if block := limits.get(Source.BLOCK):
        plan[1:1] = [Cell(1, min(DEEPER[0], block), Source.BLOCK), Cell(1, block, Source.BLOCK)]
    if reduced := limits.get(Source.REDUCED):
        plan += [Cell(1, min(DEEPER[0], reduced), Source.REDUCED)]
    plan = list(dict.fromkeys(plan))
    times: dict[Cell, list[float]] = {}
    batches: dict[int, Batch] = {}
    for cell in 2 * plan:  # twice: the machine may be busy for a while
        if plan[:2][-1] in times and time.perf_counter() - started > budget:
            break
        if cell.n not in batches:
            batches[cell.n] = prefill_prompts(model, prompts[: cell.n], max_k, model.context_length)
        times.setdefault(cell, []).append(_seconds_per_step(model, batches[cell.n], cell))
    return times


def _seconds_per_step(model: Model, batch: Batch, cell: Cell) -> float:
    """Run steps as the engine does on a GPU: the next graph is built while the device works on a step."""

    def run() -> mx.array:
        distances = () if cell.source else [1] * cell.n
        return step(model, batch, cell.k, source=cell.source, distances=distances).verdict.tokens

    for _ in range(2):  # the first also finishes what the depth before left over; both may compile kernels
        mx.eval(run(), *batch.arrays())
    started, pending = time.perf_counter(), None
    for _ in range(STEPS):  # timed together: single timings shift where the host notices the end of a step late
        tokens = run()
        mx.async_eval(tokens, *batch.arrays())
        if pending is not None:
            pending.tolist()
        pending = tokens
    mx.eval(tokens, *batch.arrays())
    return (time.perf_counter() - started) / STEPS
