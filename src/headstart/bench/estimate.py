"""Figures of a few repeats on a noisy machine, percentiles of latencies, and shares of accepted drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

MIN_TRIES = 10  # drafts at a position before the share of accepted ones is shown: fewer say nothing


@dataclass(frozen=True)
class Estimate:
    """The median of all repeats, the lowest and the highest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Percentiles:
    p50: float
    p95: float
    p99: float


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(median(values), min(values), max(values))


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return percentiles with linear interpolation between neighbours, as numpy does by default."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
    return Percentiles(cuts[49], cuts[94], cuts[98])


def accepted_shares(accepted: Sequence[int], proposed: Sequence[int]) -> list[float]:
    """Return the share of drafts accepted by position, up to the last position that was tried often enough."""
    return [a / p for a, p in zip(accepted, proposed, strict=True) if p >= MIN_TRIES]
