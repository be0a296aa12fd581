"""Estimate how long a pass over part of a prompt takes, from passes that were timed.

A token costs more the more tokens it attends to, so times are kept by context length, in classes that double. The
median of the last few counts: a busy moment, or the first pass of a process, must not decide the next ones.
"""

from collections import deque
from statistics import median

CLASS = 512  # tokens of context in the first class; each further one reaches twice as far
KEPT = 5  # timed passes by class


class PrefillTime:
    """Running estimates of the time of passes. It reads no clock: `observe` is given the seconds."""

    def __init__(self, overhead: int) -> None:
        """`overhead`: tokens that take as long as what every pass does besides."""
        self._overhead = overhead
        self._rates: dict[int, deque[float]] = {}  # seconds per token, by class of context length

    def observe(self, begin: int, end: int, seconds: float) -> None:
        """Learn from a pass over the tokens from `begin` to `end`."""
        rates = self._rates.setdefault(_class(begin), deque(maxlen=KEPT))
        rates.append(seconds / (end - begin + self._overhead))

    def seconds(self, begin: int, width: int) -> float | None:
        """Return the estimated seconds of a pass over `width` tokens after `begin`; None if nothing was timed."""
        rate = self._rate(begin)
        return None if rate is None else rate * (width + self._overhead)

    def width(self, begin: int, seconds: float) -> float | None:
        """Return how many tokens after `begin` can be read in so many seconds; None if nothing was timed."""
        rate = self._rate(begin)
        return None if rate is None else seconds / rate - self._overhead

    def _rate(self, begin: int) -> float | None:
        if not self._rates:
            return None
        wanted = _class(begin)
        return median(self._rates[min(self._rates, key=lambda each: abs(each - wanted))])


def _class(begin: int) -> int:
    return (begin // CLASS).bit_length()
