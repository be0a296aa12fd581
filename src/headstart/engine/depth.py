"""How many drafts a step, chosen by what they earn: tokens that are expected to stand over the time they take.

Both sides are measured while the engine runs: how often drafts at each position stand, in each row and in all of
them, and what a step of so many rows and drafts takes. Zero drafts is one of the choices. Nothing here looks at a
drafted token or its probability, only at what was known before the draw, so the choice cannot bias the text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cards import MAX_K

MEMORY = 0.95  # what an observation still weighs a round later: some 20 rounds count
FADED = 3.0  # rounds that old knowledge of the first draft still counts for
ALIKE = 6.0  # rounds by which a position is taken to be like the one before it
YOUNG = 6.0  # rounds by which a new row leans on the others
GUESS = 0.75  # acceptance before anything was drafted
HYSTERESIS = 0.02  # a gain below which depth is left as it is
BUDGET = 0.008  # share of the time that may go into finding out whether another depth has become better
SOONEST = 12  # rounds between two looks at another depth
PROMISING = 0.1  # expected loss up to which a depth that was never measured is tried at once
SURE = 3  # observations of a depth before its time is believed
SHARED, OWN = 0.2, 0.15  # how far a surprising time moves all depths, and its own
SLOPE = 0.12  # what a draft adds to a step of none, before anything was measured


@dataclass
class Survival:
    """How often the draft at each position stands once those before it do, recent rounds weighing most."""

    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_K)
    stood: list[float] = field(default_factory=lambda: [0.0] * MAX_K)
    seen: list[int] = field(default_factory=lambda: [0] * MAX_K)  # the round in which each was last tried

    def observe(self, accepted: int, proposed: int, round: int) -> None:
        for j in range(min(proposed, accepted + 1)):  # the one after the last accepted was tried too
            kept = self._kept(j, round)
            self.tried[j], self.stood[j] = self.tried[j] * kept + 1, self.stood[j] * kept + (j < accepted)
            self.seen[j] = round

    def rates(self, prior: Sequence[float], weight: float, round: int) -> list[float]:
        """Chances by position; what is not known well here leans on `prior` by `weight` rounds."""
        kept = [self._kept(j, round) for j in range(MAX_K)]
        return [
            (stood * keep + weight * p) / (tried * keep + weight)
            for stood, tried, keep, p in zip(self.stood, self.tried, kept, prior, strict=True)
        ]

    def pooled(self, round: int) -> list[float]:
        """Chances without a prior: a position that was not tried of late is taken for like the one before it."""
        rates, before = [], GUESS
        for j in range(MAX_K):
            kept, weight = self._kept(j, round), ALIKE if j else 1.0
            before = (self.stood[j] * kept + weight * before) / (self.tried[j] * kept + weight)
            rates.append(before)
        return rates

    def _kept(self, j: int, round: int) -> float:
        """What the past weighs by now. The first position never fades quite: there is nothing to infer it from."""
        kept = MEMORY ** (round - self.seen[j])
        return max(kept, min(1.0, FADED / self.tried[j])) if j == 0 and self.tried[j] else kept


@dataclass
class Cost:
    """Seconds a step by (rows, k), and a guess where none was measured.

    A machine that slows down slows down at every depth, so part of a surprise moves `scale`, which all cells share:
    otherwise a depth that was not measured for a while would look fast.
    """

    cells: dict[tuple[int, int], float] = field(default_factory=dict)
    seen: dict[tuple[int, int], int] = field(default_factory=dict)  # observations of each
    scale: float = 1.0

    def observe(self, rows: int, k: int, seconds: float) -> None:
        cell = (rows, k)
        self.seen[cell] = seen = self.seen.get(cell, 0) + 1
        if seen == 1:  # the first step of a shape compiles and allocates
            return
        if seen <= SURE:  # of the first few the best: a hiccup must not be all that is known of a depth
            self.cells[cell] = min(self.cells.get(cell, math.inf), seconds / self.scale)
            return
        surprise = seconds / (self.cells[cell] * self.scale)
        surprise = min(max(surprise, 0.7), 1.4)  # a hiccup is not a trend
        self.scale *= surprise**SHARED
        self.cells[cell] *= surprise**OWN

    def known(self, rows: int) -> list[int]:
        return sorted(k for r, k in self.cells if r == rows)

    def predict(self, rows: int, k: int) -> float:
        if (rows, k) in self.cells:
            return self.cells[rows, k] * self.scale
        ks = self.known(rows)
        if not ks:
            others = {r for r, _ in self.cells}
            if not others:
                return (1 + SLOPE * k) * self.scale
            return self.predict(min(others, key=lambda r: abs(math.log(r / rows))), k)
        if len(ks) == 1:
            return self.predict(rows, ks[0]) * (1 + SLOPE * k) / (1 + SLOPE * ks[0])
        low = max((known for known in ks if known < k), default=ks[0])
        high = min((known for known in ks if known > k), default=ks[-1])
        if low == high or high < k:
            low, high = ks[-2], ks[-1]
        elif low > k:
            low, high = ks[0], ks[1]
        a, b = self.predict(rows, low), self.predict(rows, high)
        return max(a + (b - a) * (k - low) / (high - low), 0.5 * min(a, b))


@dataclass(eq=False)
class Drafter:
    """What the controller knows of one row."""

    ceiling: int
    survival: Survival = field(default_factory=Survival)


class Depth:
    """Chooses k for each step of a batch. It only reads a clock through what `observe` is told, so several machines
    can share one: the others are told the choices."""

    def __init__(self, most: int = MAX_K, start: int = 2):
        self.most = most
        self.cost = Cost()
        self.pool = Survival()
        self._current: dict[int, int] = {}  # by number of rows
        self._looked: dict[tuple[int, int], int] = {}  # the round in which (rows, k) last ran
        self._before: dict[int, int] = {}  # what ran last, by number of rows
        self._again = 0  # times in a row that it was run again to be sure
        self._round = 0
        self._start = start

    def choose(self, rows: Sequence[Drafter]) -> int:
        """The depth of the next step."""
        self._round += 1
        most = min(self.most, max((row.ceiling for row in rows), default=0))
        if most == 0:
            return 0
        count, values = len(rows), self.values(rows, most)
        best = max(range(most + 1), key=values.__getitem__)
        current = self._current.get(count, min(self._start, most))
        if current > most or values[best] > values[current] * (1 + HYSTERESIS):
            current = best
        self._current[count] = current
        return self._look_around(count, current, values)

    def values(self, rows: Sequence[Drafter], most: int) -> list[float]:
        """Tokens a second of the whole batch by k = 0..most, as far as is known."""
        prior = self.pool.pooled(self._round)
        tokens = [float(len(rows))] * (most + 1)
        for row in rows:
            survival = 1.0
            for j, rate in enumerate(row.survival.rates(prior, YOUNG, self._round)[: min(most, row.ceiling)]):
                survival *= rate
                for k in range(j + 1, most + 1):
                    tokens[k] += survival
        return [tokens[k] / self.cost.predict(len(rows), k) for k in range(most + 1)]

    def observe(
        self, rows: Sequence[Drafter], k: int, outcomes: Sequence[tuple[int, int]], seconds: float | None
    ) -> None:
        """A step of these rows landed: (accepted, proposed) of each, and how long it took, if that is known."""
        for row, (accepted, proposed) in zip(rows, outcomes, strict=True):
            row.survival.observe(accepted, proposed, self._round)
            self.pool.observe(accepted, proposed, self._round)
        if seconds is not None and rows:
            self.cost.observe(len(rows), k, seconds)

    def _look_around(self, rows: int, current: int, values: list[float]) -> int:
        """Now and then the depth beside the current one, or none at all, or one never tried that might be better:
        the more it is expected to lose, the more seldom."""
        before = self._before.get(rows, current)
        if 0 < self.cost.seen.get((rows, before), 0) < SURE and before < len(values) and self._again < 2 * SURE:
            self._again += 1  # not sure yet of what was looked at last
            return before
        self._again = 0
        chosen, reach = current, max(self.cost.known(rows), default=0) + 2
        for k in range(min(len(values), reach + 1)):
            measured = (rows, k) in self.cost.cells
            if k == current or (measured and abs(k - current) > 1 and k > 0):
                continue
            # What the round would cost beyond its tokens' worth, in rounds of the current depth.
            longer = self.cost.predict(rows, k) / self.cost.predict(rows, current)
            loss = longer * max(1 - values[k] / values[current], 0.0)
            wait = loss / BUDGET if measured or loss > PROMISING else 0
            if self._round - self._looked.get((rows, k), 0) >= max(wait, SOONEST if measured else 2):
                chosen = k
                break
        self._looked[rows, chosen] = self._round
        self._before[rows] = chosen
        return chosen
