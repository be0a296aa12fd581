"""What a step costs by (rows, k): measured where it was run, and elsewhere what a step is made of.

Clocks mislead on a busy machine, so three things are kept apart. *Pace*: a machine slows down and recovers at every
depth alike, so while depth stays as it is, a surprise is the pace's. *Cells*: two depths are compared where one
follows the other, and many such looks count for more than the last. *Parts*: a step is something fixed, something a
row, something a draft, and something for the place that a draft takes in a row's window; fitted to the cells, they
say what a depth or a number of rows costs that was never run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

Cell = tuple[int, int]  # rows, k

FAST, SLOW = -0.5, 0.25  # how far one time may surprise, as logarithms: a hiccup is slow, never fast
FAR = 0.8  # … and the first one of a cell, from what was thought of it
PACE, PACE_FRESH = 0.3, 0.2  # share of a surprise that is the pace's; less just after a change of depth
FRESH = 4  # rounds after a change of depth in which the pace is known from the depth before
OWN = 0.15  # least share of a surprise that is the cell's, just after a change of depth
FADES = 0.99  # what is known of a cell still weighs a step later: what drafts cost may drift
TRUST = 0.7  # what one look at a cell counts for; what the parts say of it counts for 1
DOUBT = 0.25  # by what share a cell may turn out to be faster than the parts say if nothing like it was run
MISSED = 0.3  # share of that which one cell more or less says
BEGUN, MOST_TO_BEGIN = 0.2, 2.0  # share of what one beginning says, and the most it may say
REFIT = 24  # comparisons between two fits of the parts
LEAN = 0.001  # how much the fit leans on the parts it began with
BEGIN = (0.6, 0.15, 0.1, 0.06)  # what a step is made of before anything was measured: fixed, row, place, draft


@dataclass
class Seen:
    """What was measured of a cell."""

    level: float  # logarithm of its time at pace 1
    weight: float = 1.0  # what is known of it counts for so many looks; it fades once there is another
    at: int = 0  # the step at which it counted for so many
    once: bool = True  # it was measured only once
    made_of: float = 0.0  # what the parts say of the level


@dataclass
class Cost:
    cells: dict[Cell, Seen] = field(default_factory=dict)
    pace: float = 0.0  # logarithm of seconds
    parts: list[float] = field(default_factory=lambda: list(BEGIN))
    beginning: float = 0.0  # what it takes beyond a step that drafts begin, in steps without drafts
    _curves: dict[int, list[float]] = field(default_factory=dict)  # by rows: the level of each k
    _last: Cell | None = None  # what ran last
    _run: int = 0  # rounds for which it has
    _missed: float = DOUBT  # by how much the parts were off where a cell was first run
    _unfitted: int = 0  # comparisons since the parts were fitted
    _steps: int = 0

    def calibrate(self, seconds: Mapping[Cell, Sequence[float]]) -> None:
        """Times measured side by side; the best of a cell's is its."""
        least = min(seconds)
        self.pace = math.log(min(seconds[least])) - self._made_of(*least)
        for cell, each in seconds.items():
            self.cells[cell] = Seen(math.log(min(each)) - self.pace, float(len(each)), once=len(each) == 1)
        self._fit()

    def observe(self, rows: int, k: int, seconds: float | None) -> None:
        """A step took that long, if that is known. The first one after another depth clears up what that one left
        (drafts to fold, tokens the head has not seen), so it says nothing of its depth, only what to begin costs."""
        cell, before = (rows, k), self._last
        self._steps += 1
        self._run = self._run + 1 if cell == before else 1
        self._last = cell if seconds is not None else None
        if seconds is None:
            return
        if self._run == 1:
            if k and before == (rows, 0) and cell in self.cells:
                plain, usual = (math.exp(self.pace + self._level(rows, each)) for each in (0, k))
                more = min((seconds - usual) / plain, MOST_TO_BEGIN)
                self.beginning += BEGUN * (more - self.beginning)
            return
        measured, seen = math.log(seconds) - self.pace, self.cells.get(cell)
        if seen is None:
            if not self.cells:
                self.pace, measured = math.log(seconds) - self._made_of(*cell), self._made_of(*cell)
            guess = self._level(rows, k)
            self._missed += MISSED * (min(abs(measured - guess), DOUBT) - self._missed)
            self.cells[cell] = Seen(min(max(measured, guess - FAR), guess + FAR), at=self._steps)
            self._fit()
            return
        fresh = self._run <= FRESH
        self.pace += (PACE_FRESH if fresh else PACE) * _bounded(measured - self._level(rows, k))
        if not fresh:
            return
        seen.weight = 1 + min(seen.weight, 1 / OWN) * FADES ** (self._steps - seen.at)
        seen.at = self._steps
        if seen.once and measured < seen.level - SLOW:  # the first was a hiccup
            seen.level = measured
        else:
            seen.level += _bounded(measured - seen.level) / seen.weight
        seen.once = False
        self._unfitted += 1
        if self._unfitted >= REFIT:
            self._fit()
        elif len(curve := self._curves.get(rows, [])) > k:
            curve[k] = self._level(rows, k)

    def curve(self, rows: int, most: int) -> list[float]:
        """Seconds a step of so many rows by k = 0..most."""
        curve = self._curves.get(rows, [])
        if len(curve) <= most:
            curve = self._curves[rows] = [self._level(rows, k) for k in range(most + 1)]
        return [math.exp(self.pace + level) for level in curve[: most + 1]]

    def doubt(self, rows: int, k: int) -> float:
        """By what share a depth that was never run may be faster than `curve` says: down to the next lower one that
        was, since more drafts seldom take less."""
        run = next((j for j in range(k, -1, -1) if (rows, j) in self.cells), None)
        if run is None:
            return self._missed
        return min(math.exp(self._level(rows, k) - self._level(rows, run)) - 1, self._missed) if run != k else 0.0

    def _level(self, rows: int, k: int) -> float:
        """What the parts say, and as much of it as is known how far this cell and those like it are off that."""
        level, weight, off = self._made_of(rows, k), 1.0, 0.0
        for (r, j), seen in self.cells.items():
            if r == rows and j == k:
                alike = TRUST * seen.weight
            else:
                alike = _alike(r, j, rows, k)
            weight, off = weight + alike, off + alike * (seen.level - seen.made_of)
        return level + off / weight

    def _made_of(self, rows: int, k: int) -> float:
        fixed, row, place, draft = self.parts
        return math.log(fixed + row * rows + place * rows * k + draft * k)

    def _fit(self) -> None:
        """The parts, none below zero, that come closest to all cells in proportion."""
        size = range(len(BEGIN))
        matrix = [[LEAN / BEGIN[i] ** 2 if i == j else 0.0 for j in size] for i in size]
        right = [LEAN / BEGIN[i] for i in size]
        for (rows, k), seen in self.cells.items():
            share = math.exp(-seen.level)
            x = (share, share * rows, share * rows * k, share * k)
            for i in size:
                right[i] += seen.weight * x[i]
                for j in size:
                    matrix[i][j] += seen.weight * x[i] * x[j]
        for _ in range(40):  # one part after the other, the rest held: four parts settle in less
            for i in size:
                rest = sum(matrix[i][j] * self.parts[j] for j in size if j != i)
                self.parts[i] = max((right[i] - rest) / matrix[i][i], 1e-6)
        for cell, seen in self.cells.items():
            seen.made_of = self._made_of(*cell)
        self._curves.clear()
        self._unfitted = 0


@cache
def _alike(r: int, j: int, rows: int, k: int) -> float:
    """How much what is known of one cell says of another: they are alike in positions and in rows."""
    return 0.5 / (1 + 4 * abs(math.log(r * (j + 1) / (rows * (k + 1)))) + abs(math.log(r / rows))) ** 2


def _bounded(surprise: float) -> float:
    return min(max(surprise, FAST), SLOW)
