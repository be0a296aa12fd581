"""How many drafts a step, chosen by what they earn: tokens that are expected to stand over the time they take.

Both sides are measured while the engine runs: how often drafts at each position stand, in each row and in all of
them, and what a step of so many rows and drafts takes (`cost.py`). Zero drafts is one of the choices. Nothing here
looks at a drafted token or its probability, only at what was known before the draw, so the choice cannot bias the
text.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..cards import DEFAULT_K, MAX_K
from .cost import Cost

MEMORY, LATELY = 0.96, 0.8  # what an observation still weighs a round later: some 25 rounds count, lately 5
CHANGED = 5.0  # square of the surprise, in standard deviations, from which the text has changed
OF_ALL = (0.997, 20.0)  # both, for all texts together: a new one leans on many of them, not on the last
FADED = 3.0  # rounds that old knowledge of a position still counts for
ALIKE = 6.0  # rounds by which a position is taken to be like the one before it
YOUNG, GROWN = 15.0, 4.0  # rounds by which a new row leans on the others, and one that has seen enough of its own
GUESS = 0.75  # acceptance before anything was drafted
HYSTERESIS = 0.03  # a gain below which depth is not raised
STAY = 25  # rounds in which drafts must earn what it costs that they begin
LOOK = 2  # rounds of a look at another depth, one more where it is unknown: the first round is not timed
BETWEEN = 3  # rounds between two looks
# Rounds until the same depth is looked at again at the soonest, share of the time that may go into it, and rounds
# after which it is looked at whatever it may cost, once steps can be timed:
UNKNOWN = (6, 0.01, 100)  # what it takes was never measured, and might be little enough
UNTRIED = (1, 0.05, 250)  # no row was drafted for yet, and others' texts say little of these: the share is one row's
PARKED = (12, 0.008, 250)  # how drafts fare is only known from looks: the share is one row's too
SEVERAL = 0.005  # … and that of many
DRAFTING = (12, 0.003, 100)  # … is known without them; only what it takes may have changed


@dataclass
class Survival:
    """How often the draft at each position stands once those before it do.

    Recent rounds weigh most. Where the last few of a text say something else than was to be expected, it has
    changed, and what came before them is dropped."""

    memory: float = MEMORY
    changed: float = CHANGED
    lean: float = YOUNG  # rounds by which it leans on others
    tried: list[float] = field(default_factory=lambda: [0.0] * MAX_K)
    stood: list[float] = field(default_factory=lambda: [0.0] * MAX_K)
    lately_tried: list[float] = field(default_factory=lambda: [0.0] * MAX_K)
    lately_stood: list[float] = field(default_factory=lambda: [0.0] * MAX_K)
    seen: list[int] = field(default_factory=lambda: [0] * MAX_K)  # the round in which each was last tried

    def observe(self, accepted: int, proposed: int, round: int) -> None:
        surprise, variance = 0.0, 0.0
        self.lean = max(self.lean * MEMORY, GROWN)
        for j in range(min(proposed, accepted + 1)):  # the one after the last accepted was tried too
            age, stood = round - self.seen[j], j < accepted
            kept, lately = self._kept(self.tried[j], age), LATELY**age
            tried = self.lately_tried[j] = self.lately_tried[j] * lately + 1
            self.lately_stood[j] = self.lately_stood[j] * lately + stood
            chance = (self.stood[j] + 0.5) / (self.tried[j] + 1)  # before this round
            surprise += self.lately_stood[j] - tried * chance
            variance += tried * chance * (1 - chance)
            self.tried[j], self.stood[j] = self.tried[j] * kept + 1, self.stood[j] * kept + stood
            self.seen[j] = round
        if surprise * surprise > self.changed * variance:
            self.tried, self.stood, self.lean = self.lately_tried.copy(), self.lately_stood.copy(), GROWN

    def rates(self, prior: Sequence[float], round: int) -> list[float]:
        """Chances by position; what is not known well here leans on `prior`."""
        rates = []
        for chance, tried, stood, seen in zip(prior, self.tried, self.stood, self.seen, strict=False):
            kept = self._kept(tried, round - seen)
            rates.append((stood * kept + self.lean * chance) / (tried * kept + self.lean))
        return rates

    def pooled(self, most: int, round: int) -> list[float]:
        """Chances without a prior: a position that was not tried of late is taken for like the one before it."""
        rates, before = [], GUESS
        for j in range(most):
            kept, weight = self._kept(self.tried[j], round - self.seen[j]), ALIKE if j else 1.0
            before = (self.stood[j] * kept + weight * before) / (self.tried[j] * kept + weight)
            rates.append(before)
        return rates

    def _kept(self, tried: float, age: int) -> float:
        """What the past weighs by now. It never fades quite: old knowledge is better than none."""
        return max(self.memory**age, FADED / tried) if tried > FADED else 1.0


@dataclass(eq=False)
class Drafter:
    """What the controller knows of one row."""

    ceiling: int
    survival: Survival = field(default_factory=Survival)


class Controller(Protocol):
    """Whoever chooses. Several machines share one choice: the first has a `Depth`, the others are told."""

    @property
    def gains(self) -> Sequence[float]: ...

    def choose(self, rows: Sequence[Drafter]) -> int: ...

    def observe(
        self, rows: Sequence[Drafter], k: int, outcomes: Sequence[tuple[int, int]], seconds: float | None
    ) -> None: ...


class Depth:
    """Chooses k for each step of a batch. It only reads a clock through what `observe` is told."""

    def __init__(self, most: int = MAX_K, start: int = DEFAULT_K):
        self.most = most
        self.cost = Cost()
        self.pool = Survival(*OF_ALL)
        self.gains: list[float] = []  # tokens a second to those of k = 0, by k, as of the last choice
        self._current = start
        self._rounds: Counter[int] = Counter()  # by number of rows: rounds so far
        self._ran: dict[tuple[int, int], int] = {}  # which of these rounds (rows, k) last was
        self._look: tuple[int, int, int] | None = None  # rows, the depth that is looked at, and the one it is beside
        self._left = 0  # rounds of the look to come
        self._pays = False  # whether each of its rounds made more than one of the depth beside would have
        self._beside = 0.0  # tokens a second of that one, as of the last choice
        self._next_look = 0  # the round from which there may be another
        self._timed = True  # whether it is known how long the last step took
        self._round = 0

    def choose(self, rows: Sequence[Drafter]) -> int:
        """The depth of the next step."""
        self._round += 1
        most = min(self.most, max((row.ceiling for row in rows), default=0))
        if most == 0:
            return 0
        count = len(rows)
        self._rounds[count] += 1
        seconds = self.cost.curve(count, most)
        values = [tokens / time for tokens, time in zip(self.tokens(rows, most), seconds, strict=True)]
        self.gains = [value / values[0] for value in values]
        best = max(range(most + 1), key=values.__getitem__)
        current = self._current
        enough = 1 + HYSTERESIS if best > current else 1.0  # fewer drafts are the surer thing
        if current == 0:
            enough += max(self.cost.beginning, 0.0) / STAY
        if current > most or values[best] > values[current] * enough:
            current = best
        self._current = current
        untried = not any(row.survival.tried[0] for row in rows)
        chosen = self._look_around(count, current, values, seconds, untried)
        self._ran[count, chosen] = self._rounds[count]
        return chosen

    def tokens(self, rows: Sequence[Drafter], most: int) -> list[float]:
        """Tokens that a step of k = 0..most is expected to make, of all rows together."""
        prior = self.pool.pooled(most, self._round)
        added = [float(len(rows))] + [0.0] * most
        for row in rows:
            survival = 1.0
            for j, rate in enumerate(row.survival.rates(prior[: row.ceiling], self._round)):
                survival *= rate
                added[j + 1] += survival
        for k in range(most):
            added[k + 1] += added[k]
        return added

    def observe(
        self, rows: Sequence[Drafter], k: int, outcomes: Sequence[tuple[int, int]], seconds: float | None
    ) -> None:
        """A step of these rows landed: (accepted, proposed) of each, and how long it took, if that is known."""
        for row, (accepted, proposed) in zip(rows, outcomes, strict=True):
            row.survival.observe(accepted, proposed, self._round)
            self.pool.observe(accepted, proposed, self._round)
        if not rows:
            return
        self.cost.observe(len(rows), k, seconds)
        self._timed = seconds is not None
        if self._look == (len(rows), k, 0):  # at zero nothing but looks tells how drafts fare
            tokens = sum(accepted + 1 for accepted, _ in outcomes)
            self._pays = self._pays and tokens > self._beside * self.cost.curve(len(rows), k)[k]
            if self._pays:
                self._left = max(self._left, 1)

    def _look_around(self, rows: int, current: int, values: list[float], seconds: list[float], untried: bool) -> int:
        """Now and then the depth beside the current one or the second best: the more it is expected to lose, the
        more seldom. Not while rows come and go, when a step cannot be timed: a look would teach little, and keep
        those waiting that have not begun."""
        self._beside = values[current]
        if self._look is not None:
            at, k, beside = self._look
            if (at, beside) != (rows, current) or k >= len(values):
                self._look = None
            elif self._left:
                self._left -= 1
                self._next_look = self._round + 1 + BETWEEN
                return k
        if self._round < self._next_look or not self._timed:
            return current
        others = [k for k in range(len(values)) if k != current]
        worth = {max(others, key=values.__getitem__), current - 1, current + 1}
        for k in others:
            doubt = self.cost.doubt(rows, k)
            if k not in worth and not (k == 0 and doubt):
                continue
            unknown = doubt > 0 and (k == 0 or values[k] * (1 + doubt) > values[current])
            if unknown:
                soon, share, late = UNKNOWN
            elif current == 0:
                soon, share, late = UNTRIED if untried else PARKED
                share = max(share / rows**2, SEVERAL)  # a look tells of all rows, which are more like those before
            else:
                soon, share, late = DRAFTING
            rounds = LOOK + 1 if unknown else LOOK
            # What the look would cost beyond its tokens' worth, in rounds of the current depth.
            loss = rounds * seconds[k] / seconds[current] * max(1 - values[k] / values[current], 0.0)
            if current == 0:
                loss += max(self.cost.beginning, 0.0)
            if k == 0 and doubt:  # what the others are compared with must be known
                loss = 0.0
            if self._rounds[rows] - self._ran.get((rows, k), 0) >= min(max(loss / share, soon), late):
                self._look, self._left, self._pays = (rows, k, current), rounds - 1, True
                self._next_look = self._round + 1 + BETWEEN
                return k
        return current
