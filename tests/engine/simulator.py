"""A machine and a text that are made of numbers, to try the choice of depth on."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from headstart.cards import MAX_K
from headstart.engine.depth import Depth, Drafter

Costs = Callable[[int, int, int], float]  # rows, k, round → seconds a step
Text = Callable[[int, int], float]  # round, position → how likely the draft there stands, given those before it


@dataclass
class Result:
    tokens: float
    seconds: float
    best: float  # tokens that the best depth of every round, known beforehand, makes in that time
    depths: list[int]
    right: list[int]  # the best depth of every round

    @property
    def share(self) -> float:
        return self.tokens / self.best


def expected(text: Text, round: int, k: int) -> float:
    tokens, survival = 1.0, 1.0
    for j in range(k):
        survival *= text(round, j)
        tokens += survival
    return tokens


def simulate(
    costs: Costs, text: Text, rounds: int, rows: Callable[[int], int] = lambda round: 1, seed: int = 0
) -> Result:
    """Run the controller over `rounds` steps. Times are noisy, with a hiccup of ten times now and then."""
    rng = random.Random(seed)
    depth, drafters = Depth(), [Drafter(MAX_K) for _ in range(64)]
    result = Result(0, 0, 0, [], [])
    for round in range(rounds):
        count = rows(round)
        running = drafters[:count]
        k = depth.choose(running)
        outcomes = []
        for _ in running:
            accepted = 0
            while accepted < k and rng.random() < text(round, accepted):
                accepted += 1
            outcomes.append((accepted, k))
        seconds = costs(count, k, round)
        noisy = seconds * rng.lognormvariate(0, 0.05) * (10 if rng.random() < 0.01 else 1)
        depth.observe(running, k, outcomes, noisy)
        best = max(range(MAX_K + 1), key=lambda k: expected(text, round, k) / costs(count, k, round))
        # Expected tokens, not drawn ones: luck is not what is judged.
        result.tokens += count * expected(text, round, k)
        result.seconds += seconds
        result.best += seconds * count * expected(text, round, best) / costs(count, best, round)
        result.depths.append(k)
        result.right.append(best)
    return result
