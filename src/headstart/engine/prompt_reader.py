"""Read the prompts of waiting sequences, in slices between the steps of running ones."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from ..models import Model
from ..state import PrefixCache
from .decisions import Decisions
from .prefill import prefill_chunk, start_prefill
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
        self.slices = Slices(model.reading.backend)
        self._reading: SequenceState | None = None  # whose prompt the last pass was over, if it may be running
        self._pass_finished = 0.0  # when the last pass was seen to have ended
        self._step_finished = 0.0  # when the tokens of the last step were read

    def read(self, *, runs_ahead: bool) -> None:
        """Read for as long as running sequences may wait. `runs_ahead`: return before the device has done it."""
        if self._reading is not None:
            with self._recovering(self._reading) as sequence:
                self._finish_pass(sequence)
        self.slices.begin(bool(self.scheduler.running.sequences))
        while self.scheduler.prefilling:
            if not self._read_slice(self.slices.next(self.scheduler.prefilling), runs_ahead):
                return

    def read_chunk(self) -> None:
        """Read a chunk of the first waiting prompt, whoever runs."""
        with self._recovering(self.scheduler.prefilling[0]) as sequence:
            self._start(sequence)
            self._read(sequence, self.recovery.widest_pass)

    def observe_step(self, started: float, finished: float) -> None:
        """Learn how long a step took beside what the device did before it."""
        self.slices.observe_step(finished - max(started, self._step_finished, self._pass_finished))
        self._step_finished = finished

    def _read_slice(self, sequence: SequenceState, runs_ahead: bool) -> bool:
        """Read a part of a prompt. Return whether there may be time for more."""
        with self._recovering(sequence):
            self._start(sequence)
            begin, last = sequence.num_prefilled, len(sequence.tokens) - 1
            if width := self.decisions.slice(lambda: self.slices.width(begin, last)):
                self._read(sequence, width, runs_ahead)
                if sequence.num_prefilled > begin:  # no image is in the vision tower, and it did not start over
                    self.slices.charge(begin, sequence.num_prefilled)
                    return True
        return False

    def _start(self, sequence: SequenceState) -> None:
        if sequence.batch is None:
            narrowed = self.recovery.widest_pass < self.model.reading.backend.widest
            start_prefill(self.model, sequence, self.prefix, self.marker, narrowed=narrowed)

    def _read(self, sequence: SequenceState, width: int, runs_ahead: bool = True) -> None:
        """Launch a pass over a prompt, and let the sequence decode if it was the last one."""
        self.scheduler.running.steady = False
        complete = prefill_chunk(self.model, sequence, self.prefix, min(self.recovery.widest_pass, width))
        self._reading = sequence
        if not runs_ahead:
            self._finish_pass(sequence)
        if complete and sequence.suspect:
            self.try_alone(sequence)
        elif complete:
            self.scheduler.running.join(sequence)
            self.scheduler.prefilling.remove(sequence)

    def _finish_pass(self, sequence: SequenceState) -> None:
        """Wait for the pass that was launched last, and learn how long it took."""
        self._reading, launched = None, sequence.launched
        if sequence.batch is None or launched is None:
            return  # it decodes, or is recomputed
        mx.eval(sequence.batch.arrays())
        begin, started = launched
        sequence.launched, self._pass_finished = None, time.perf_counter()
        seconds = self._pass_finished - max(started, self._step_finished)
        self.slices.time.observe(begin, sequence.num_prefilled, seconds)

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
