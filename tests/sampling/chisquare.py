"""Pearson's test without scipy, and what it takes to compare counts with an exact law."""

import math

import numpy as np


def p_value(counts: np.ndarray, law: np.ndarray | None = None) -> float:
    """Of counts against a law (uniform where none is given)."""
    return tail(*statistic(counts, law))


def statistic(counts: np.ndarray, law: np.ndarray | None = None, least: float = 5.0) -> tuple[float, int]:
    """Pearson's, and its degrees of freedom. Cells that expect fewer than `least` are merged into one."""
    counts = np.asarray(counts, np.float64).reshape(-1)
    law = np.full(len(counts), 1 / len(counts)) if law is None else np.asarray(law, np.float64).reshape(-1)
    expected = counts.sum() * law / law.sum()
    if counts[law == 0].sum() > 0:
        return math.inf, 1  # something was said that cannot be said
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    small = int((expected < least).sum())
    while 0 < small < len(expected) and expected[:small].sum() < least:
        small += 1
    if small:
        counts = np.concatenate([[counts[:small].sum()], counts[small:]])
        expected = np.concatenate([[expected[:small].sum()], expected[small:]])
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def tail(x: float, freedom: int) -> float:
    """How likely chance alone makes a statistic of x or more. Sums of statistics and of freedoms go together."""
    return 1.0 if freedom == 0 else 0.0 if math.isinf(x) else upper_gamma(freedom / 2, x / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function: series below a + 1, continued fraction above."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * scale)
    b, c = x + 1 - a, 1e300
    d = 1 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-14:
            break
    return scale * h
