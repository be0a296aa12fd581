"""Estimate how long a decode step takes, by batch size n and depth k.

log(seconds) = pace + level(n, k). The pace is the machine's speed right now: a busy or hot machine slows every step
alike. The level is what n and k cost beside each other. A pair (n, k) that was timed has a level of its own; any
other follows a linear model, fixed + sequence·n + draft·k + position·n·k, shifted to the nearest depth that was
timed with n sequences.

While one depth runs on, an unexpected timing is put down to the pace. Only the steps just after a change of depth
compare two depths at one pace, so only those change the levels.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..models import Model
from .batch import Batch
from .step import prefill_prompts, step

SMOOTHING = 0.25  # share of a surprise that the pace takes up, and the resume cost
CLIP = 0.35  # largest surprise that counts, as a logarithm: one outlier must not rule a depth out
COMPARED = 4  # steps after a change of depth, the first not timed, that compare it with the depth before
FADING = 0.992  # weight that earlier timings of a pair keep per step: what drafts cost may drift
INITIAL_MODEL = (0.6, 0.15, 0.06, 0.1)  # before anything was timed: fixed, sequence, draft, position

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23]
DEEPER = (3, 7)  # depths timed besides 0 and 1
CALIBRATION_BATCH = 4  # sequences timed besides 1; the linear model gives any other number
STEPS = 3  # timed together
BUDGET = 0.5  # seconds after which nothing more is timed, once k = 0 and 1 of one sequence are
WARM_UP_BUDGET = 4.0  # the same for a server that has no request yet: enough to time everything twice


@dataclass
class Timing:
    """What was measured of one (n, k)."""

    level: float
    weight: float  # number of timings it stands for, as of `step`
    step: int = 0


class StepTime:
    """Running estimates of step times. It reads no clock: `observe` is given the seconds."""

    def __init__(self) -> None:
        self.timings: dict[int, dict[int, Timing]] = {}  # by n, then k
        self.resume = 0.0  # log of how much longer the first step with drafts after a pause takes
        self._pace = 0.0
        self._model = list(INITIAL_MODEL)
        self._last: tuple[int, int] | None = None  # (n, k) of the step before, if it was timed
        self._repeats = 0  # steps for which that has been the same
        self._steps = 0

    def calibrate(self, seconds: Mapping[tuple[int, int], Sequence[float]]) -> None:
        """Start from timings taken one after the other; the shortest of each (n, k) counts."""
        logs = {pair: math.log(min(each)) for pair, each in seconds.items()}
        first = min(logs)
        self._pace = logs[first] - self._modelled(*first)
        for _ in range(200):  # half corrections, over and over, converge on a small relative error
            for (n, k), log in logs.items():
                self._correct_model(n, k, 0.5 * (log - self._pace - self._modelled(n, k)))
        for (n, k), log in logs.items():
            self.timings.setdefault(n, {})[k] = Timing(log - self._pace, len(seconds[n, k]))

    def seconds(self, n: int, k: int) -> float:
        """Return the estimated seconds of a step of n sequences with k drafts each."""
        return math.exp(self._pace + self._level(n, k))

    def observe(self, n: int, k: int, seconds: float | None) -> None:
        """Learn from a step that took `seconds`; None if its time is not known.

        The first step at another depth also pays for what the depth before left over (drafts to drop, tokens the
        head has not seen), so it only updates the cost of resuming.
        """
        before = self._last
        self._last = (n, k) if seconds is not None else None
        self._steps += 1
        self._repeats = self._repeats + 1 if before == (n, k) else 1
        if seconds is None:
            return
        if self._repeats == 1:
            if k and before == (n, 0):
                self.resume += SMOOTHING * (_clipped(math.log(seconds / self.seconds(n, k))) - self.resume)
            return
        if not self.timings:
            self._pace = math.log(seconds) - self._modelled(n, k)
        surprise = _clipped(math.log(seconds) - self._pace - self._level(n, k))
        if self._repeats <= COMPARED:
            timing = self.timings.setdefault(n, {}).setdefault(k, Timing(self._level(n, k), 0.0))
            timing.weight = 1 + timing.weight * FADING ** (self._steps - timing.step)
            timing.step = self._steps
            timing.level += surprise / timing.weight
        self._pace += SMOOTHING * surprise

    def _level(self, n: int, k: int) -> float:
        timed = self.timings.get(n)
        if not timed:
            return self._modelled(n, k)
        if k in timed:
            return timed[k].level
        nearest = min(timed, key=lambda other: (abs(other - k), other))
        return timed[nearest].level + self._modelled(n, k) - self._modelled(n, nearest)

    def _modelled(self, n: int, k: int) -> float:
        fixed, sequence, draft, position = self._model
        return math.log(fixed + sequence * n + draft * k + position * n * k)

    def _correct_model(self, n: int, k: int, surprise: float) -> None:
        """Raise the model's level at (n, k) by `surprise`, each term by its share in the step."""
        total = math.exp(self._modelled(n, k))
        shares = [term * x / total for term, x in zip(self._model, (1, n, k, n * k), strict=True)]
        rate = surprise / sum(share * share for share in shares)
        self._model = [term * math.exp(rate * share) for term, share in zip(self._model, shares, strict=True)]


def _clipped(surprise: float) -> float:
    return min(max(surprise, -CLIP), CLIP)


def time_steps(
    model: Model, max_k: int, max_sequences: int, budget: float = BUDGET
) -> dict[tuple[int, int], list[float]]:
    """Measure steps before a model's first answer, and return seconds per step by (n, k), once per measurement.

    Takes about `budget` seconds. To learn this while a user waits would cost a short answer more than drafts save.
    """
    started = time.perf_counter()
    tokens = [token % model.vocabulary for token in PROMPT]
    prompts = [tokens[i:] + tokens[:i] for i in range(CALIBRATION_BATCH)]  # different ones use more MoE experts
    batched = min(CALIBRATION_BATCH, max_sequences)
    plan = dict.fromkeys([(1, 0), (1, 1), (batched, 0), (batched, 1), *((1, k) for k in DEEPER)])
    times: dict[tuple[int, int], list[float]] = {}
    batches: dict[int, Batch] = {}
    for n, k in 2 * [pair for pair in plan if pair[1] <= max_k]:  # twice: the machine may be busy for a while
        if (1, min(1, max_k)) in times and time.perf_counter() - started > budget:
            break
        if n not in batches:
            batches[n] = prefill_prompts(model, prompts[:n], max_k, model.context_length)
        times.setdefault((n, k), []).append(_seconds_per_step(model, batches[n], k))
    return times


def _seconds_per_step(model: Model, batch: Batch, k: int) -> float:
    """Run steps as the engine does on a GPU: the next graph is built while the device works on a step."""
    for _ in range(2):  # the first also finishes what the depth before left over; both may compile kernels
        mx.eval(step(model, batch, k).tokens, *batch.arrays())
    started, pending = time.perf_counter(), None
    for _ in range(STEPS):  # timed together: single timings shift where the host notices the end of a step late
        tokens = step(model, batch, k).tokens
        mx.async_eval(tokens, *batch.arrays())
        if pending is not None:
            pending.tolist()
        pending = tokens
    mx.eval(tokens, *batch.arrays())
    return (time.perf_counter() - started) / STEPS
