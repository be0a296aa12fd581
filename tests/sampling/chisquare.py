"""Pearson's test without scipy, and what it takes to compare counts with an exact law."""

import math

import numpy as np


def p_value(counts: np.ndarray, law: np.ndarray | None = None, least: float = 5.0) -> float:
    """Of counts against a law (uniform where none is given). Cells that expect fewer than `least` are merged."""
    counts = np.asarray(counts, np.float64).reshape(-1)
    law = np.full(len(counts), 1 / len(counts)) if law is None else np.asarray(law, np.float64).reshape(-1)
    expected = counts.sum() * law / law.sum()
    if counts[law == 0].sum() > 0:
        return 0.0  # something was said that cannot be said
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    small = int((expected < least).sum())
    while 0 < small < len(expected) and expected[:small].sum() < least:
        small += 1
    if small:
        counts = np.concatenate([[counts[:small].sum()], counts[small:]])
        expected = np.concatenate([[expected[:small].sum()], expected[small:]])
    if len(counts) < 2:
        return 1.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return upper_gamma((len(counts) - 1) / 2, statistic / 2)


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
