"""How sure a figure is that was measured a few times on a noisy machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

CONFIDENCE = 0.95
DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A median, and where it would lie in 95 of 100 such measurements."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """By the bootstrap: medians of as many values drawn with replacement. The draws are the same every time."""
    rng = Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    tail = round(DRAWS * (1 - CONFIDENCE) / 2)
    return Estimate(median(values), medians[tail], medians[-tail - 1])
