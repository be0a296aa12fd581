"""Read the prompts of waiting sequences, in slices between the steps of running ones."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..models import Model
from ..state import PrefixCache
from .decisions import Decisions
from .prefill import open_pass, run_pass, start_prefill
from .prompt_pass import PromptPass
from .recovery import Recovery
from .scheduler import Scheduler
from .sequence import SequenceState
from .slices import Slices
from .turns import TurnMarker


class PromptReader:
    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        recovery: Recovery,
        decisions: Decisions,
        prefix: PrefixCache | None,
        marker: TurnMarker | None,
        try_alone: Callable[[SequenceState], None],
    ):
        """`try_alone`: what becomes of a sequence whose prompt is complete and that is suspected of a failure."""
        self.model = model
        self.scheduler = scheduler
        self.recovery = recovery
        self.decisions = decisions
        self.prefix = prefix
        self.marker = marker
        self.try_alone = try_alone
        self.slices = Slices(model.reading.backend, max(len(model.layers), 1) if decisions.alone else 1)
        self._running: tuple[SequenceState, PromptPass] | None = None  # pieces that may be
        self._piece_finished = 0.0  # when the last piece was seen to have ended
        self._step_finished = 0.0  # when the tokens of the last step were read

    def read(self, *, runs_ahead: bool, meanwhile: Callable[[], None]) -> None:
        """Read for as long as running sequences may wait.

        Args:
            runs_ahead: Return before the device has done it.
            meanwhile: What to do once the device has something to do: wait for the step before.
        """
        if self._running is not None:
            with self._recovering(self._running[0]):
                self._finish_piece(*self._running)
        streaming = bool(self.scheduler.running.sequences)
        self.slices.begin(streaming)
        # What runs ahead of the host must be little at first, or when the step before ended is seen too late.
        most = self.model.reading.backend.layers_ahead if runs_ahead and streaming else None
        while self.scheduler.prefilling:
            if not self._read_slice(self.slices.next(self.scheduler.prefilling), runs_ahead, most):
                return
            if runs_ahead:
                meanwhile()
            most = None

    def read_pass(self) -> None:
        """Read the first waiting prompt for a whole pass, whoever runs."""
        with self._recovering(self.scheduler.prefilling[0]) as sequence:
            self._start(sequence)
            if (reading := sequence.reading or self._open(sequence, self.recovery.widest_pass)) is not None:
                self._run(sequence, reading, reading.left, runs_ahead=True)

    def observe_step(self, started: float, finished: float) -> None:
        """Learn how long a step took beside what the device did before it."""
        self.slices.observe_step(finished - max(started, self._step_finished, self._piece_finished))
        self._step_finished = finished

    def _read_slice(self, sequence: SequenceState, runs_ahead: bool, most: int | None) -> bool:
        """Read a part of a prompt, at `most` so many pieces. Return whether there may be time for more."""
        with self._recovering(sequence):
            slices, last = self.slices, len(sequence.tokens) - 1
            self._start(sequence)
            if (reading := sequence.reading) is None:
                widest = self.decisions.slice(lambda: slices.width(sequence.num_prefilled, last))
                reading = self._open(sequence, widest) if widest else None
            if reading is None:
                return False  # there is no time, or an image is in the vision tower
            underway = reading
            if pieces := self.decisions.slice(lambda: min(slices.pieces(underway), most or underway.left)):
                self._run(sequence, reading, pieces, runs_ahead=runs_ahead)
                slices.charge(reading, pieces)
                return True
        return False

    def _start(self, sequence: SequenceState) -> None:
        if sequence.batch is None:
            narrowed = self.recovery.widest_pass < self.model.reading.backend.widest
            start_prefill(self.model, sequence, self.prefix, self.marker, narrowed=narrowed)

    def _open(self, sequence: SequenceState, widest: int) -> PromptPass | None:
        """Begin a pass over a prompt; None if it cannot begin yet."""
        widest, whole = min(self.recovery.widest_pass, widest), not self.decisions.alone
        sequence.reading = open_pass(self.model, sequence, self.prefix, widest, whole=whole)
        return sequence.reading

    def _run(self, sequence: SequenceState, reading: PromptPass, pieces: int, *, runs_ahead: bool) -> None:
        """Launch pieces of a pass, and let the sequence decode if they were its prompt's last."""
        self.scheduler.running.steady = False
        if self._running is not None and self._running[1] is not reading:
            self._running[1].running = 0
        complete = run_pass(self.model, sequence, self.prefix, reading, pieces)
        self._running = sequence, reading
        if not runs_ahead:
            self._finish_piece(sequence, reading)
        if not reading.left:
            sequence.reading = None
        if complete and sequence.suspect:
            self.try_alone(sequence)
        elif complete:
            self.scheduler.running.join(sequence)
            self.scheduler.prefilling.remove(sequence)

    def _finish_piece(self, sequence: SequenceState, reading: PromptPass) -> None:
        """Wait for the pieces that were launched last, and learn how long they took."""
        self._running = None
        if sequence.batch is None:
            return  # it decodes, or is recomputed
        mx.eval(sequence.batch.arrays(), reading.made)
        self._piece_finished = time.perf_counter()
        reading.seconds += self._piece_finished - max(reading.launched, self._step_finished)
        reading.timed += reading.running
        reading.running = 0
        if not reading.left and reading.total is not None:
            self.slices.time.observe(reading.begin, reading.end, reading.total)

    @contextmanager
    def _recovering(self, sequence: SequenceState) -> Iterator[SequenceState]:
        """Recover from an error that concerns a sequence whose prompt is read."""
        try:
            yield sequence
        except Exception as error:
            if not self.decisions.alone:
                raise
            self.recovery.after_prefill(sequence, error)
        self.scheduler.drop_finished()
