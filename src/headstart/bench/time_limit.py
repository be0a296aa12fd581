"""Limits of time for a report: for each of its parts, and for all of it."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WHOLE = 300.0  # seconds
GRACE = 30.0  # seconds beyond that, after which something hangs


class OutOfTime(Exception):
    """A part has taken as long as it may."""


@dataclass
class TimeLimit:
    """The time that is left. Parts look at it between two things that they do."""

    whole: float = WHOLE
    clock: Callable[[], float] = time.monotonic
    ends: float = field(init=False)
    part_ends: float = field(init=False)

    def __post_init__(self) -> None:
        self.ends = self.part_ends = self.clock() + self.whole

    @contextmanager
    def part(self, seconds: float) -> Iterator[None]:
        """Give a part so many seconds, or what is left."""
        if self.clock() >= self.ends:
            raise OutOfTime(f"left out: {self.whole:.0f} s are over")
        self.part_ends = min(self.clock() + seconds, self.ends)
        yield

    def extend(self, seconds: float) -> None:
        """Give the part so many seconds from now on, or what is left, if that is later."""
        self.part_ends = max(self.part_ends, min(self.clock() + seconds, self.ends))

    def reopen(self, seconds: float) -> None:
        """Give what follows at least so many seconds."""
        self.ends = max(self.ends, self.clock() + seconds)

    @property
    def is_over(self) -> bool:
        return self.clock() >= self.part_ends

    def check(self) -> None:
        """Raise if the part's time is over."""
        if self.is_over:
            raise OutOfTime("not finished in the time that it may take")


@contextmanager
def ended_if_it_hangs(
    limit: TimeLimit, say: Callable[[], None], end: Callable[[int], None] = os._exit, grace: float = GRACE
) -> Iterator[None]:
    """Say what there is and end the process, if it is still here long after its time: what waits for a driver cannot
    be interrupted."""

    def give_up() -> None:
        say()
        sys.stdout.flush()
        sys.stderr.flush()
        end(1)

    watch = threading.Timer(limit.whole + grace, give_up)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
