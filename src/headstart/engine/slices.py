"""Choose which prompt is read next, and how many of its tokens, while running sequences wait for their next step.

**How many.** Between two steps, prompts are read for at most READ_STEPS times as long as a step takes. So a running
sequence waits for its next token no longer than READ_STEPS + 1 of its steps, and keeps a share of
1 / (READ_STEPS + 1) of the device; prompts keep the rest, several of them in one slice if they are short. Where a
prompt may not be cut freely, a pass over a whole chunk takes longer than that. Then no prompt is read until the steps
that it delayed have followed, at most for as long as MOST_DEBT seconds of prompts are worth.

**Which.** The prompt with the least left, so that a short one does not wait for a long one. Every OLDEST_EVERY-th
time it is the one that was admitted first: short prompts that keep coming do not stop it. A sequence that is
recomputed goes before all: someone is in the middle of its answer.

Where a prompt is cut changes no bit: cuts are multiples of what the backend names (`Backend.cut`), and where it
names nothing only whole chunks are read.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from ..kernels import Backend
from .prefill_time import PrefillTime
from .sequence import SequenceState

READ_STEPS = 3.0  # time for prompts between two steps, in steps
MOST_DEBT = 3.0  # seconds of a pass beyond that time for which steps make up
ALONE = 1.0  # seconds of a pass while nobody waits for a step: other requests and cancellations wait for its end
GRID = 8  # slices are multiples of this or of `cut`, and no shorter: products compute so many rows at a time
OLDEST_EVERY = 4
KEPT = 5  # timed steps


class Slices:
    def __init__(self, reader: Backend):
        """`reader`: what reads prompts."""
        self.time = PrefillTime(reader.pass_overhead)
        self.others = 0.0  # seconds of a step of other engines' running sequences: see DeviceThread
        self._cut = reader.cut
        self._widest = reader.widest
        self._grid = max(GRID, reader.cut or 0)
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._streaming = False
        self._first = True  # the next slice is the first of its iteration
        self._left = 0.0  # seconds for prompts before the next step; negative after a pass that took longer
        self._passes = 0

    @property
    def step(self) -> float:
        """Return the seconds of a step of the running sequences, 0 if none was timed."""
        return median(self._steps) if self._steps else 0.0

    def observe_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def begin(self, running: bool) -> None:
        """Begin an iteration of the engine. `running`: it has sequences that wait for their next step."""
        debt = min(self._left, 0.0) if self._streaming else 0.0
        self._streaming = running or self.others > 0
        self._left = debt + READ_STEPS * (self.step * running + self.others)
        self._first = True

    def next(self, waiting: Sequence[SequenceState]) -> SequenceState:
        """Return the sequence whose prompt is to be read."""
        if self._passes % OLDEST_EVERY == OLDEST_EVERY - 1:
            return waiting[0]
        return min(waiting, key=lambda each: 0 if each.num_generated else len(each.tokens) - each.num_prefilled)

    def width(self, begin: int, end: int) -> int:
        """Return how many tokens to read after `begin` of a prompt that goes to `end`; 0 for none before the next
        step. A prompt with nothing left may take one."""
        most, first, self._first = min(max(end - begin, 1), self._widest), self._first, False
        width = most if self._cut is None else self._fit(begin, most)
        if not self._streaming:
            return width if first else 0
        if first:  # as few as may be, however long they take
            return width if self._left >= 0 else 0
        seconds = self.time.seconds(begin, width)
        return width if seconds is not None and seconds <= self._left else 0

    def charge(self, begin: int, end: int) -> None:
        """Count the time of a pass that was launched. If none was timed yet, it is the only one before the step."""
        self._passes += 1
        seconds = self.time.seconds(begin, end - begin)
        self._left = max(self._left - seconds, -MOST_DEBT) if seconds is not None else 0.0

    def _fit(self, begin: int, most: int) -> int:
        """Return how many of `most` tokens there is time for, as multiples of the grid. Before a pass was timed: the
        least, or all if nobody waits."""
        fits = self.time.width(begin, self._left if self._streaming else ALONE)
        if fits is None:
            return min(self._grid, most) if self._streaming else most
        return min(max(round(fits / self._grid), 1) * self._grid, most)
