"""Simulated machines and texts for the depth controller.

python tests/engine/simulator.py [--rows 4] [--busy]    the table of docs/explanation/depth-controller.md
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headstart.engine.depth import DepthController, DraftHistory, Plan
from headstart.limits import MAX_HEAD_K, MAX_K

Costs = Callable[[int, int, int], float]  # rows, k, round → seconds a step
Text = Callable[[int, int], float]  # round, position → chance that the draft there is accepted, given those before it
BatchState = Callable[[int], int]  # round → sequences in the batch


MACHINES: dict[str, Costs] = {
    "flat": lambda rows, k, round: 1 + 0.02 * k * rows + 0.05 * k,
    "linear": lambda rows, k, round: (1 + 0.9 * k) * rows,
    "cpu": lambda rows, k, round: (1 + 0.5 * k) * rows**0.8,
    "step at 8": lambda rows, k, round: (1.0 if rows * (k + 1) <= 8 else 2.0) + 0.06 * k,
    "slowing": lambda rows, k, round: (1 + 0.3 * k) * (1 + round / 400),
    "drifting": lambda rows, k, round: 1 + k * (0.1 + round / 600),  # drafts cost more and more
}
TEXTS: dict[str, Text] = {
    "good": lambda round, j: 0.9,
    "falling": lambda round, j: (0.9, 0.8, 0.6, 0.4, 0.3, 0.2, 0.2, 0.2)[j],
    "poor": lambda round, j: 0.3,
    "good, then poor": lambda round, j: 0.9 if round < 300 else 0.25,
    "poor, then good": lambda round, j: 0.25 if round < 300 else 0.9,
}


@dataclass
class Result:
    depths: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # expected in each round, not drawn, to leave out luck
    best: list[float] = field(default_factory=list)  # expected of the best depth in the same time

    def share(self, begin: int = 0, end: int | None = None) -> float:
        """Return the share of an oracle's tokens, which knows all rates and step times, and when they change."""
        return sum(self.tokens[begin:end]) / sum(self.best[begin:end])


class Clock:
    """Add noise to times, and a tenfold outlier now and then. A busy machine has other load that comes and goes."""

    def __init__(self, rng: random.Random, busy: bool):
        self.rng, self.busy, self.load = rng, busy, 1.0

    def measure(self, seconds: float) -> float:
        if self.busy and self.rng.random() < 0.03:
            self.load = self.rng.choice((1.0, 1.0, 1.4, 2.0))
        outlier = 10 if self.rng.random() < 0.01 else 1
        return seconds * self.load * outlier * self.rng.lognormvariate(0, 0.12 if self.busy else 0.05)


def expected(text: Text, round: int) -> list[float]:
    """Return the expected tokens of a sequence by k."""
    tokens, survival = [1.0], 1.0
    for j in range(MAX_HEAD_K):
        survival *= text(round, j)
        tokens.append(tokens[-1] + survival)
    return tokens


def calibrated(costs: Costs, clock: Clock) -> DepthController:
    """Return a controller calibrated as the engine does: some depths of one sequence, two of four, each twice."""
    depth = DepthController()
    cells = [(1, 0), (1, 1), (1, 3), (1, 7), (4, 0), (4, 1)]
    times = {(rows, k): [clock.measure(costs(rows, k, 0)) for _ in range(2)] for rows, k in cells}
    depth.step_time.calibrate(times)
    return depth


def simulate(
    costs: Costs,
    text: Text,
    rounds: int,
    *,
    rows: BatchState = lambda round: 1,
    seed: int = 0,
    busy: bool = False,
    controller: DepthController | None = None,
) -> Result:
    rng = random.Random(seed)
    clock = Clock(rng, busy)
    depth, drafters = controller or calibrated(costs, clock), [DraftHistory(MAX_HEAD_K) for _ in range(64)]
    result = Result()
    landed: tuple[list[DraftHistory], int, list[tuple[int, int]], float] | None = None
    for round in range(rounds):
        count = rows(round)
        running = drafters[:count]
        k = depth.choose(running).k
        outcomes = []
        for _ in running:
            accepted = 0
            while accepted < k and rng.random() < text(round, accepted):
                accepted += 1
            outcomes.append((accepted, k))
        seconds = costs(count, k, round)
        if landed:  # as in the engine, depth is chosen while the step before is still running
            depth.observe(*landed)
        landed = running, k, outcomes, clock.measure(seconds)
        tokens = expected(text, round)
        rate = max(tokens[each] / costs(count, each, round) for each in range(MAX_HEAD_K + 1))
        result.depths.append(k)
        result.tokens.append(count * tokens[k])
        result.best.append(count * rate * seconds)
    return result


class Informed:
    """The best choice for a controller that knows all step times, the rates of two texts and how often they
    alternate, but not which of them is running: a bound for any rule that must notice."""

    gains = ()

    def __init__(self, costs: Costs, chances: tuple[float, float], turn: int):
        self.costs, self.chances, self.turn, self.belief = costs, chances, turn, 0.5  # in the second

    def choose(self, rows: Sequence[DraftHistory], most: int = MAX_K) -> Plan:
        tokens = [expected(lambda round, j, chance=chance: chance, 0) for chance in self.chances]
        likely = [(1 - self.belief) * a + self.belief * b for a, b in zip(*tokens, strict=True)]
        return Plan(max(range(MAX_HEAD_K + 1), key=lambda k: likely[k] / self.costs(len(rows), k, 0)))

    def observe(
        self, rows: Sequence[DraftHistory], k: int, outcomes: Sequence[tuple[int, int]], seconds: float | None
    ) -> None:
        first, second = 1 - self.belief, self.belief
        for accepted, proposed in outcomes:
            a, b = (chance**accepted * (1 - chance) ** (accepted < proposed) for chance in self.chances)
            first, second = first * a, second * b
        self.belief = second / (first + second)
        self.belief += (1 - 2 * self.belief) / self.turn  # the text may have changed since


def mean_share(machine: str, text: str, *, rows: int = 1, busy: bool = False) -> float:
    costs, chances = MACHINES[machine], TEXTS[text]
    runs = [simulate(costs, chances, 600, rows=lambda round: rows, busy=busy, seed=seed) for seed in range(8)]
    return statistics.mean(run.share() for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    arguments = parser.parse_args()
    print(f"| machine | {' | '.join(TEXTS)} |\n|{' --- |' * (1 + len(TEXTS))}")
    for machine in MACHINES:
        shares = [mean_share(machine, text, rows=arguments.rows, busy=arguments.busy) for text in TEXTS]
        print(f"| {machine} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
