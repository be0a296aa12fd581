"""Choose what to draft in each step: the source and the depth k with the most expected tokens per second.

Expected tokens come from how often drafts were accepted at each position, seconds from how long steps took
(`step_time.py`); k = 0, plain decoding, is one of the choices. Both estimates are kept up to date by what runs, and
by exploration: now and then another depth or source runs for two rounds, the more rarely the more it is expected to
lose. Copies need no exploration: whether they would have been right is known from the text (`copies.py`).

The choice depends on accepted counts and timings only, never on a drafted token or its probability, so it cannot
bias the output.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from types import MappingProxyType
from typing import NamedTuple

from ..limits import DEFAULT_K, MAX_HEAD_K, MAX_K
from ..models import Model
from .copies import CopyIndex
from .draft import Source, draft_limits
from .draft_history import DraftHistory
from .step_time import StepTime

POOL_MEMORY = 0.997  # the same for all sequences together: a new one starts from many texts, not from the last
COVERAGE = 0.9  # of a draft vocabulary, before anything was generated
COVERAGE_RATE = 0.01  # weight of a token in it
PRIOR_RATE = 0.75  # acceptance before anything was drafted
HYSTERESIS = 0.03  # least gain for which k is raised or the source changed
EXPLORE_ROUNDS = 2  # length of an exploration: its first round is not timed
EXPLORE_SHARE = 0.006  # share of the tokens that exploring a plan may cost
EXPLORE_AFTER = 8  # least rounds between two explorations of a plan


class Plan(NamedTuple):
    """What to draft in a step."""

    k: int
    source: int = Source.HEAD
    distances: tuple[int, ...] = ()  # how far back each sequence copies from, 0 for none; empty if none does


PLAIN = Plan(0)


@dataclass
class Exploration:
    """A few rounds of `plan` instead of `current`, with n sequences."""

    n: int
    plan: Plan
    current: Plan
    left: int = EXPLORE_ROUNDS  # rounds to come
    pays: bool = True  # every round so far made more tokens than `current` would have in the same time


class DepthController:
    """Depth controller of one model. All sequences of a batch share a depth, so it maximises their total."""

    def __init__(
        self,
        max_k: int = MAX_HEAD_K,
        start: int = DEFAULT_K,
        sources: Sequence[Source] = (Source.HEAD,),
        limits: Mapping[Source, int] = MappingProxyType({}),
    ):
        """Start at depth `start` with the first of the sources. `limits`: where a source drafts less than `max_k`."""
        self.max_k = max_k
        self.sources = sources
        self.limits = limits
        self.coverage = COVERAGE  # share of the generated tokens that are in the draft vocabulary
        self.step_time = StepTime()
        self.gains: list[float] = []  # tokens per second relative to k = 0, by k, as of the last choice
        self.copy_pool = DraftHistory(memory=POOL_MEMORY)  # of the copies of all sequences
        self._pool = DraftHistory(memory=POOL_MEMORY)  # of other drafts for all sequences
        self._current = Plan(start, sources[0])
        self._value = 0.0  # expected tokens per second at `_current`
        self._exploration: Exploration | None = None
        self._round = 0
        self._rounds: Counter[int] = Counter()  # by batch size
        self._ran: dict[tuple[int, Plan], int] = {}  # the last of these rounds that ran a plan with n sequences
        self._timed = True  # whether the last step was

    @classmethod
    def of(cls, model: Model) -> "DepthController":
        limits = draft_limits(model)
        return cls(model.most_drafts, model.default_k, [*limits] or [Source.HEAD], limits)

    def plan(
        self,
        histories: Sequence[DraftHistory],
        copies: Sequence[CopyIndex | None],
        unread: int = 0,
        most: int = MAX_K,
    ) -> Plan:
        """Return what to draft in the next step.

        Args:
            unread: Most tokens per sequence that were generated since `copies` was updated.
            most: Most drafts per sequence.
        """
        best, n = self.choose(histories, most), len(histories)
        copied = [[] if each is None else each.survival(self.copy_pool, unread)[:most] for each in copies]
        if not any(copied):
            return best
        # A sequence copies where that is expected to be longer than what the source drafts.
        distances = tuple(each.distance if each is not None else 0 for each in copies)
        drafted = self._survivals(histories, *best[:2])
        sums = [(sum(copy[: best.k]), sum(draft)) for copy, draft in zip(copied, drafted, strict=True)]
        longer = tuple(each * (copy > draft) for each, (copy, draft) in zip(distances, sums, strict=True))
        value = (1 + HYSTERESIS) * (n + sum(map(max, sums))) / self.step_time.seconds(n, *best[:2])
        best = best._replace(distances=longer if any(longer) else ())
        tokens = float(n)
        for j in range(max(map(len, copied))):
            tokens += sum(each[j] for each in copied if j < len(each))
            if (alone := tokens / self.step_time.seconds(n, j + 1, Source.NONE)) > value:
                best, value = Plan(j + 1, Source.NONE, distances), alone
        return best

    def choose(self, histories: Sequence[DraftHistory], most: int = MAX_K) -> Plan:
        """Return the best plan without copies, or one to explore."""
        n = len(histories)
        most = min(self.max_k, most, max((each.max_k for each in histories), default=0))
        if most == 0:
            return PLAIN
        self._round += 1
        self._rounds[n] += 1
        values, seconds = self._values(histories, most)
        self.gains = [0.0] * (most + 1)
        for plan, value in values.items():
            self.gains[plan.k] = max(self.gains[plan.k], value / values[PLAIN])
        best, current = max(values, key=values.__getitem__), self._current
        least = 1 + HYSTERESIS if best.k > current.k or (best.k and best.source != current.source) else 1.0
        if current not in values or values[best] > least * values[current]:
            self._current = best
        self._value = values[self._current]
        new = n == 1 and not histories[0].counts
        plan = self._explore(n, values, seconds, new)
        self._ran[n, plan] = self._rounds[n]
        return plan

    def observe(
        self,
        histories: Sequence[DraftHistory],
        k: int,
        outcomes: Sequence[tuple[int, int]],
        seconds: float | None,
        source: int = Source.HEAD,
    ) -> None:
        """Learn from a finished step: (accepted, proposed by the source) of each sequence, and its time if known."""
        if not histories:
            return
        for history, (accepted, proposed) in zip(histories, outcomes, strict=True):
            for each in (history, self._pool):
                each.observe(_learned_as(source), accepted, proposed)
        n = len(histories)
        self.step_time.observe(n, k, seconds, source)
        self._timed = seconds is not None
        exploration = self._exploration
        if exploration is not None and (exploration.n, exploration.plan) == (n, Plan(k, source)):
            tokens = sum(accepted + 1 for accepted, _ in outcomes)
            exploration.pays = exploration.pays and tokens > self._value * self.step_time.seconds(n, k, source)
            if exploration.pays:
                exploration.left = max(exploration.left, 1)

    def observe_coverage(self, inside: int, tokens: int) -> None:
        """Learn how many of the generated tokens are in the draft vocabulary."""
        for number in range(tokens):
            self.coverage += COVERAGE_RATE * ((number < inside) - self.coverage)

    def _values(self, histories: Sequence[DraftHistory], most: int) -> tuple[dict[Plan, float], dict[Plan, float]]:
        """Return the expected tokens per second of every plan with up to `most` drafts, and the seconds of a step."""
        n = len(histories)
        values, seconds = {}, {}
        for source in self.sources:
            limit = min(most, self.limits.get(source, most))
            tokens, survivals = float(n), self._survivals(histories, limit, source)
            for k in range(limit + 1):
                tokens += sum(each[k - 1] for each in survivals if 0 < k <= len(each))
                plan = Plan(k, source) if k else PLAIN
                seconds[plan] = self.step_time.seconds(n, k, source)
                values[plan] = tokens / seconds[plan]
        return values, seconds

    def _survivals(self, histories: Sequence[DraftHistory], most: int, source: int) -> list[list[float]]:
        """Return, by sequence and position, the chance that the source's draft and all before it are accepted.

        The reduced head drafts what the full one would, if that is in its vocabulary.
        """
        covered = self.coverage if source == Source.REDUCED else 1.0
        kinds = [(_learned_as(source), j) for j in range(most)]
        priors = list(accumulate(kinds, lambda prior, kind: self._pool.rate(kind, prior), initial=PRIOR_RATE))[1:]
        survivals = []
        for history in histories:
            rates = [covered * history.rate(*each) for each in zip(kinds, priors, strict=True)][: history.max_k]
            survivals.append(list(accumulate(rates, mul)))
        return survivals

    def _explore(self, n: int, values: dict[Plan, float], seconds: dict[Plan, float], new: bool) -> Plan:
        """Return the current plan, or another one that is due to be explored: a neighbour or the best of a source.

        `new`: the only sequence was never drafted for. Other texts say little of it, so it is tried at once."""
        current, running = self._current, self._exploration
        if running is not None:
            if running.left and (running.n, running.current) == (n, current) and running.plan in values:
                running.left -= 1
                return running.plan
            self._exploration = None
        if not self._timed:  # sequences come and go: a step that is not timed teaches little
            return current
        others = [plan for plan in values if plan != current]
        best = {max((p for p in others if p.source == plan.source), key=values.__getitem__) for plan in others}
        for plan in others:
            changed = abs(plan.k - current.k) + bool(plan.k and current.k and plan.source != current.source)
            if plan not in best and changed > 1:
                continue
            # Expected loss in rounds of the current plan.
            loss = EXPLORE_ROUNDS * seconds[plan] / seconds[current] * max(1 - values[plan] / values[current], 0.0)
            if not current.k:
                loss += max(math.exp(self.step_time.resume) - 1, 0.0) * seconds[plan] / seconds[current]
            due = max(loss / EXPLORE_SHARE, EXPLORE_AFTER)
            if (new and not current.k) or self._rounds[n] - self._ran.get((n, plan), 0) >= due:
                self._exploration = Exploration(n, plan, current, left=EXPLORE_ROUNDS - 1)
                return plan
        return current


def _learned_as(source: int) -> int:
    """Return the source under which acceptance is counted: both heads draft the same tokens where both know them."""
    return Source.HEAD if source == Source.REDUCED else source


def pause_reason(gains: Sequence[float]) -> str | None:
    """Say why speculation is paused, given the expected speed by k relative to k = 0; None where drafting pays."""
    best = max(gains[1:], default=math.inf)
    return f"drafting did not pay on this machine (estimated {best:.2f}×)" if best < 1 + HYSTERESIS else None
