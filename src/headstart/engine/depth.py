"""Choose what to draft in each step: the depth k with the most expected tokens per second, by the head or by copies.

Expected tokens come from how often drafts were accepted at each position, seconds from how long steps took
(`step_time.py`); k = 0, plain decoding, is one of the choices. Both estimates are kept up to date by what runs, and
by exploration: now and then another depth runs for two rounds, the more rarely the more it is expected to lose.
Copies need no exploration: whether they would have been right is known from the text (`copies.py`).

The choice depends on accepted counts and timings only, never on a drafted token or its probability, so it cannot
bias the output.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from ..limits import DEFAULT_K, MAX_K
from ..models import Model
from .copies import CopyIndex
from .draft import HeadUse
from .draft_history import DraftHistory
from .step_time import StepTime

POOL_MEMORY = 0.997  # the same for all sequences together: a new one starts from many texts, not from the last
COVERAGE = 0.9  # of a draft vocabulary, before anything was generated
COVERAGE_RATE = 0.01  # weight of a token in it
PRIOR_RATE = 0.75  # acceptance before anything was drafted
HYSTERESIS = 0.03  # least gain for which k is raised, or the head left out
EXPLORE_ROUNDS = 2  # length of an exploration: its first round is not timed
EXPLORE_SHARE = 0.006  # share of the tokens that exploring a depth may cost
EXPLORE_AFTER = 8  # least rounds between two explorations of a depth


class Plan(NamedTuple):
    """What to draft in a step."""

    k: int
    head: int = HeadUse.FULL  # what the head does; without it only copies are verified
    distances: tuple[int, ...] = ()  # how far back each sequence copies from, 0 for none; empty if none does


@dataclass
class Exploration:
    """A few rounds at depth `k` instead of `current`, with n sequences."""

    n: int
    k: int
    current: int
    left: int = EXPLORE_ROUNDS  # rounds to come
    pays: bool = True  # every round so far made more tokens than `current` would have in the same time


class DepthController:
    """Depth controller of one model. All sequences of a batch share a depth, so it maximises their total."""

    def __init__(self, max_k: int = MAX_K, start: int = DEFAULT_K, reduced: bool = False):
        """Start at depth `start`. `reduced`: the head may score the draft vocabulary only."""
        self.max_k = max_k
        self.reduced = reduced
        self.coverage = COVERAGE  # share of the generated tokens that are in the draft vocabulary
        self.step_time = StepTime()
        self.gains: list[float] = []  # tokens per second relative to k = 0, by k, as of the last choice
        self.copy_pool = DraftHistory(memory=POOL_MEMORY)  # of the copies of all sequences
        self._pool = DraftHistory(memory=POOL_MEMORY)  # of the head's drafts for all sequences
        self._heads: list[HeadUse] = []  # the better head by k, as of the last choice
        self._current = start
        self._value = 0.0  # expected tokens per second at `_current`
        self._exploration: Exploration | None = None
        self._round = 0
        self._rounds: Counter[int] = Counter()  # by batch size
        self._ran: dict[tuple[int, int], int] = {}  # the last of these rounds that ran (n, k)
        self._timed = True  # whether the last step was

    @classmethod
    def of(cls, model: Model) -> "DepthController":
        return cls(model.max_k, model.default_k, reduced=model.draft_vocabulary is not None)

    def plan(self, histories: Sequence[DraftHistory], copies: Sequence[CopyIndex | None], unread: int = 0) -> Plan:
        """Return what to draft in the next step.

        `unread`: most tokens per sequence that were generated since `copies` was updated.
        """
        k, n = self.choose(histories), len(histories)
        copied = [[] if each is None else each.survival(self.copy_pool, unread) for each in copies]
        if not any(copied):
            return Plan(k, self._heads[k])
        # With the head, a sequence copies where that is expected to be longer than what the head drafts.
        distances = tuple(each.distance if each is not None else 0 for each in copies)
        sums = [(sum(copy[:k]), sum(head)) for copy, head in zip(copied, self._survivals(histories, k), strict=True)]
        longer = tuple(each * (copy > head) for each, (copy, head) in zip(distances, sums, strict=True))
        best = Plan(k, self._heads[k], longer if any(longer) else ())
        value = (1 + HYSTERESIS) * (n + sum(map(max, sums))) / self.step_time.seconds(n, k, best.head)
        tokens = float(n)
        for j in range(max(map(len, copied))):
            tokens += sum(each[j] for each in copied if j < len(each))
            if (alone := tokens / self.step_time.seconds(n, j + 1, HeadUse.NONE)) > value:
                best, value = Plan(j + 1, HeadUse.NONE, distances), alone
        return best

    def choose(self, histories: Sequence[DraftHistory]) -> int:
        """Return the depth of the next step if the head drafts."""
        n = len(histories)
        most = min(self.max_k, max((each.max_k for each in histories), default=0))
        if most == 0:
            self._heads = [HeadUse.FULL]
            return 0
        self._round += 1
        self._rounds[n] += 1
        values, seconds = self._values(histories, most)
        self.gains = [value / values[0] for value in values]
        best = max(range(most + 1), key=values.__getitem__)
        least = 1 + HYSTERESIS if best > self._current else 1.0
        if self._current > most or values[best] > least * values[self._current]:
            self._current = best
        self._value = values[self._current]
        new = n == 1 and not histories[0].tried[0]
        k = self._explore(n, values, seconds, new)
        self._ran[n, k] = self._rounds[n]
        return k

    def observe(
        self,
        histories: Sequence[DraftHistory],
        k: int,
        outcomes: Sequence[tuple[int, int]],
        seconds: float | None,
        head: int = HeadUse.FULL,
    ) -> None:
        """Learn from a finished step: (accepted, proposed by the head) of each sequence, and its time if known."""
        if not histories:
            return
        for history, (accepted, proposed) in zip(histories, outcomes, strict=True):
            history.observe(accepted, proposed)
            self._pool.observe(accepted, proposed)
        n = len(histories)
        self.step_time.observe(n, k, seconds, head)
        self._timed = seconds is not None
        exploration = self._exploration
        if head and exploration is not None and (exploration.n, exploration.k) == (n, k):
            tokens = sum(accepted + 1 for accepted, _ in outcomes)
            exploration.pays = exploration.pays and tokens > self._value * self.step_time.seconds(n, k, head)
            if exploration.pays:
                exploration.left = max(exploration.left, 1)

    def observe_coverage(self, inside: int, tokens: int) -> None:
        """Learn how many of the generated tokens are in the draft vocabulary."""
        for number in range(tokens):
            self.coverage += COVERAGE_RATE * ((number < inside) - self.coverage)

    def _values(self, histories: Sequence[DraftHistory], most: int) -> tuple[list[float], list[float]]:
        """Return the expected tokens per second by k = 0..most, and the seconds of such a step, with the better head.

        The reduced head drafts what the full one would, if that is in its vocabulary.
        """
        n, survivals = len(histories), self._survivals(histories, most)
        found = []
        for head in (HeadUse.FULL, HeadUse.REDUCED) if self.reduced else (HeadUse.FULL,):
            covered = self.coverage if head == HeadUse.REDUCED else 1.0
            tokens = float(n)
            for k in range(most + 1):
                tokens += sum(each[k - 1] for each in survivals if 0 < k <= len(each)) * covered**k
                seconds = self.step_time.seconds(n, k, head)
                found.append((tokens / seconds, seconds, head, k))
        best = [max(each for each in found if each[3] == k) for k in range(most + 1)]
        self._heads = [head for _, _, head, _ in best]
        return [value for value, *_ in best], [seconds for _, seconds, *_ in best]

    def _survivals(self, histories: Sequence[DraftHistory], most: int) -> list[list[float]]:
        """Return, by sequence and position, the chance that the head's draft and all before it are accepted."""
        priors, prior = [], PRIOR_RATE
        for j in range(most):
            prior = self._pool.rate(j, prior)
            priors.append(prior)
        survivals = []
        for history in histories:
            rates = [history.rate(j, priors[j]) for j in range(min(most, history.max_k))]
            survivals.append(list(accumulate(rates, mul)))
        return survivals

    def _explore(self, n: int, values: list[float], seconds: list[float], new: bool) -> int:
        """Return the current depth, or another one that is due to be explored: a neighbour or the second best.

        `new`: the only sequence was never drafted for. Other texts say little of it, so it is tried at once."""
        current, running = self._current, self._exploration
        if running is not None:
            if running.left and (running.n, running.current) == (n, current) and running.k < len(values):
                running.left -= 1
                return running.k
            self._exploration = None
        if not self._timed:  # sequences come and go: a step that is not timed teaches little
            return current
        others = [k for k in range(len(values)) if k != current]
        second = max(others, key=values.__getitem__)
        for k in others:
            if k != second and abs(k - current) > 1:
                continue
            # Expected loss in rounds of the current depth.
            loss = EXPLORE_ROUNDS * seconds[k] / seconds[current] * max(1 - values[k] / values[current], 0.0)
            if current == 0:
                loss += max(math.exp(self.step_time.resume) - 1, 0.0) * seconds[k] / seconds[0]
            due = max(loss / EXPLORE_SHARE, EXPLORE_AFTER)
            if (new and current == 0) or self._rounds[n] - self._ran.get((n, k), 0) >= due:
                self._exploration = Exploration(n, k, current, left=EXPLORE_ROUNDS - 1)
                return k
        return current


def pause_reason(gains: Sequence[float]) -> str | None:
    """Say why speculation is paused, given the expected speed by k relative to k = 0; None where drafting pays."""
    best = max(gains[1:], default=math.inf)
    return f"drafting did not pay on this machine (estimated {best:.2f}×)" if best < 1 + HYSTERESIS else None
