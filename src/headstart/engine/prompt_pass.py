"""A pass over a part of a prompt, which running sequences may interrupt."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass
class PromptPass:
    """A pass of which some pieces have run: layers of the model, or windows of known tokens."""

    begin: int
    end: int
    pieces: int
    steps: Iterator[mx.array]  # runs them one by one, and gives what may be computed so far
    left: int  # pieces that have not run
    launched: float = 0.0  # when those that may be running were
    running: int = 0  # how many these are
    made: list[mx.array] = field(default_factory=list)  # by them
    seconds: float = 0.0  # that the device took for those that were `timed`
    timed: int = 0

    @property
    def width(self) -> int:
        return self.end - self.begin

    @property
    def total(self) -> float | None:
        """Return the seconds of the whole pass, as far as some of it was timed."""
        return self.seconds * self.pieces / self.timed if self.timed else None
