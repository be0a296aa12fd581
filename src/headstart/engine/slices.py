"""Choose which prompt is read next, and how much of it, while running sequences wait for their next step.

**How much.** Between two steps, prompts are read for at most READ_STEPS times as long as a step takes. So a running
sequence waits for its next token no longer than READ_STEPS + 1 of its steps, and keeps a share of
1 / (READ_STEPS + 1) of the device; prompts keep the rest, several of them in one slice if they are short. A pass is
made of pieces, the layers of the model, and a slice is as many as there is time for. Where a prompt may be cut, a
pass is so narrow that there is time for one. Where a piece takes longer, no prompt is read until the steps that it
delayed have followed, at most for as long as MOST_DEBT seconds of prompts are worth.

**Which.** The prompt with the least left, so that a short one does not wait for a long one. Every OLDEST_EVERY-th
time it is the one that was admitted first: short prompts that keep coming do not stop it. A sequence that is
recomputed goes before all: someone is in the middle of its answer.

Neither changes a bit: cuts are multiples of what the backend names (`Backend.cut`), and where it names nothing they
do not depend on time.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

from ..kernels import Backend
from .prefill_time import PrefillTime
from .prompt_pass import PromptPass
from .sequence import SequenceState

READ_STEPS = 3.0  # time for prompts between two steps, in steps
MOST_DEBT = 3.0  # seconds of a pass beyond that time for which steps make up
ALONE = 1.0  # seconds of a pass while nobody waits for a step: other requests and cancellations wait for its end
GRID = 8  # slices are multiples of this or of `cut`, and no shorter: products compute so many rows at a time
OLDEST_EVERY = 4
KEPT = 5  # timed steps
SEVERAL = 4  # pieces of a pass: the layers of most models repeat after so many


class Slices:
    def __init__(self, reader: Backend, pieces: int):
        """`reader`: what reads prompts, in passes of so many `pieces`."""
        self.time = PrefillTime(reader.pass_overhead)
        self.others = 0.0  # seconds of a step of other engines' running sequences: see DeviceThread
        self._pieces = pieces
        self._cut = reader.cut
        self._widest = reader.widest
        self._grid = max(GRID, reader.cut or 0)
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._streaming = False
        self._first = True  # the next slice is the first of its iteration
        self._budget = 0.0  # seconds for prompts between two steps
        self._left = 0.0  # of these before the next step; negative after what took longer
        self._slices = 0

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
        self._budget = READ_STEPS * (self.step * running + self.others)
        self._left = debt + self._budget
        self._first = True

    def next(self, waiting: Sequence[SequenceState]) -> SequenceState:
        """Return the sequence whose prompt is to be read."""
        if self._slices % OLDEST_EVERY == OLDEST_EVERY - 1:
            return waiting[0]
        return min(waiting, key=lambda each: 0 if each.num_generated else len(each.tokens) - each.num_prefilled)

    def width(self, begin: int, end: int) -> int:
        """Return how wide a pass may be that begins after `begin` tokens of a prompt that goes to `end`; 0 for none
        before the next step. A prompt with nothing left may take one."""
        if not self._has_time():
            return 0
        most = min(max(end - begin, 1), self._widest)
        if self._cut is None:
            return most
        fits = self.time.width(begin, self._pieces * (self._budget if self._streaming else ALONE))
        if fits is None:  # nothing was timed yet
            return min(self._grid, most) if self._streaming else most
        return min(max(round(fits / self._grid), 1) * self._grid, most)

    def pieces(self, reading: PromptPass) -> int:
        """Return how many pieces of a pass to run before the next step. The first time in an iteration it is one at
        least, however long that takes."""
        has_time, first, self._first = self._has_time(), self._first, False
        if not has_time:
            return 0
        seconds = self._seconds(reading)
        if seconds is None:
            return 0 if not first else reading.left if self._cut is not None else 1
        count = int((self._left if self._streaming else ALONE) * reading.pieces / seconds)
        return min(max(count, int(first)), reading.left)

    def charge(self, reading: PromptPass, pieces: int) -> None:
        """Count the time of pieces that were launched. If none was timed yet, they are the last before the step."""
        self._slices += 1
        seconds = self._seconds(reading)
        if seconds is None:
            self._left = 0.0
        else:
            self._left = max(self._left - seconds * pieces / reading.pieces, -MOST_DEBT)

    def _has_time(self) -> bool:
        if not self._streaming:
            return self._first
        return self._left >= 0 if self._first else self._left > 0

    def _seconds(self, reading: PromptPass) -> float | None:
        """Return how long a pass takes: by those of its pieces that were timed if they are several, or by passes like
        it."""
        seconds = self.time.seconds(reading.begin, reading.width)
        return reading.total if seconds is None or reading.timed >= SEVERAL else seconds
