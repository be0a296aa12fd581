"""Rows come, decode together, and go. One thread owns the device and calls `turn` again and again.

A turn admits requests, takes in at most one chunk of a prompt, describes a step for all running rows, starts it, and,
while the device works on it, hands out what the step before said. So the host waits once a step, and learns of an end
one step late: the surplus round of a finished row counts nowhere. A CPU is handed a step only when what the one
before said is out. Where a row has a grammar, a step is not even described before that.

A row can always be begun again from its tokens, and goes on bit for bit as it would have (on CUDA, where prompts have
other kernels, up to rounding, and the stats say so). So where memory runs short the youngest gives up its place for a
while, and a step that fails costs its rows time and not their answers.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from threading import Lock
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..errors import HeadstartError
from ..limits import MAX_K
from ..models import Model
from ..state import PrefixCache
from ..thread_exit import wait_at_exit
from .batch import Batch
from .calibrate import BUDGET, CALIBRATION_BATCH, WARM_UP_BUDGET, step_times
from .depth import Controller, DepthController, pause_reason
from .exact import rows_are_independent, widest
from .log import LOG, report
from .memory import is_shortage
from .pending_step import PendingStep, describe, launches_ahead
from .prefill import prefill_chunk
from .scheduler import Scheduler
from .sequence import SequenceState

_depths: WeakKeyDictionary[Model, DepthController] = WeakKeyDictionary()


class Engine(Scheduler):
    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper | None = None,
        *,
        max_sequences: int = 16,
        max_queue: int | None = None,
        memory_limit: int | None = None,
        depth: Controller | None = None,
        prefix: PrefixCache | None = None,
    ):
        """With a tokenizer, events carry text, its end tokens end an answer, and stop strings and grammars work.

        `memory_limit`: bytes that the rows' memory may take; by default what this device has left. `depth` chooses k
        for requests that leave it open; by default what was learned of this model so far goes on to be used, and
        before the first of them a few steps are timed. `prefix`: where beginnings of prompts are kept for others.
        """
        super().__init__(model, tokenizer, max_sequences, max_queue, memory_limit, prefix)
        maybe_set_recommended_wired_limit()  # Metal: keep the weights resident
        self.depth: Controller = depth or _depths.setdefault(model, DepthController(model.max_k, model.default_k))
        self.communication_seconds = 0.0  # between machines, in all rounds
        self.retries = 0  # decode steps and prefill chunks that failed and were run again
        self.recomputed: Counter[str] = Counter()  # sequences that lost their KV cache, by reason
        self._ahead = launches_ahead()
        self._turning = Lock()
        self._batch: Batch | None = None
        self._flight: PendingStep | None = None
        self._landed = 0.0  # when the last round was known
        self._steady = False

    @property
    def busy(self) -> bool:
        return bool(self.entering or self.rows or self._flight or len(self.queue))

    def turn(self) -> bool:
        """One turn. False when nothing is left to do."""
        wait_at_exit()
        with self._turning:
            self._end_cancelled()
            self._drop_finished()
            self._admit()
            if self.entering and not self._ahead:  # what is said does not wait for another's prompt
                self._attempt(self._land)
            self._prefill_chunk()
            self._attempt(self._step)
        return self.busy

    def warm_up(self) -> None:
        """Do what the first request would otherwise wait for. Before the engine is turned."""
        rows_are_independent(self.model)
        if self.model.has_head:
            self._calibrate(WARM_UP_BUDGET)

    def prefill_all(self) -> None:
        """Take in the prompts of all that find a place before any of them goes on, so that they decode together."""
        with self._turning:
            self._admit()
            while self.entering:
                self._prefill_chunk()

    def settle(self) -> None:
        """Wait for the step in flight, and tell what it said."""
        with self._turning:
            self._attempt(self._land)

    def skip(self, seconds: float) -> None:
        """So long the device worked for others: the next step did not take that."""
        self._landed += seconds

    def end_all(self, error: HeadstartError) -> None:
        """Nothing can go on. By the thread that turned the engine."""
        for row in (*self.queue.clear(), *self.entering, *self.rows):
            if not row.over:
                row.finish("error", error)
        self.entering.clear()
        self._forget_batch()

    def recompute_all(self) -> None:
        """Whatever the device holds of the rows is not to be trusted: begin them again from their tokens."""
        for row in self.entering:
            self._recompute(row, "restart")
        self._enter_again([row for row in self.rows if not row.over], "restart")

    def _prefill_chunk(self) -> None:
        """At most one chunk of one prompt, so that running rows do not stall. All but its last token is taken in:
        that one opens the first window."""
        if not self.entering:
            return
        row = self.entering[0]
        try:
            if row.batch is None and row.auto:
                self._calibrate()
            self._steady = False
            if not prefill_chunk(self.model, row, self.prefix):
                return
            if row.handle.request.score == "only":
                row.finish("length")
            elif row.suspect:
                self._try_alone(row)
            else:
                self._join(row)
                self.entering.popleft()
        except Exception as error:
            self._end_or_retry(row, error)
        self.entering = deque(row for row in self.entering if not row.over)

    def _end_or_retry(self, row: SequenceState, error: Exception) -> None:
        """A row that fails while it is taken in ends alone. Where memory ran out it is begun again: the first time
        with the prefix cache emptied, and then each time the youngest of those that hold memory has ended."""
        if not is_shortage(error):
            report(LOG, "prefill failed; its request ends with an error", error=error)
            row.finish("error", error)
            return
        report(LOG, "prefill ran out of memory", error=error)
        if row.retried or not self._empty_prefix():  # what the row itself has left there since does not count
            holding = (*self.rows, *(r for r in self.entering if r.batch))
            youngest = max(holding, key=lambda row: row.started, default=row)
            youngest.finish("error", error)
            self._drop_finished()
        row.retried = True
        if not row.over:
            self.retries += 1
            self._recompute(row, "memory")

    def _empty_prefix(self) -> bool:
        """True if there was something to let go of."""
        if self.prefix is None or not self.prefix.stats().bytes:
            return False
        self.prefix.clear()
        mx.clear_cache()
        return True

    def _calibrate(self, budget: float = BUDGET) -> None:
        """Time a few steps of a model that nothing is known of."""
        depth = _depths.get(self.model)
        if depth is not None and depth is self.depth and not depth.step_time.timings:
            several = self.footprint.bytes([1] * CALIBRATION_BATCH) <= self.memory
            depth.step_time.calibrate(
                step_times(self.model, depth.most, self.max_sequences if several else 1, budget)
            )

    def _join(self, row: SequenceState) -> None:
        assert row.batch is not None
        rows = row.fork()
        if len(rows) > 1:
            row.batch.fork([each.asked for each in rows], self.model)
        if self._batch is None:
            self._batch = row.batch
        else:
            self._batch.join(row.batch, self.model)
        row.batch, self._steady = None, False
        self.rows += rows

    def _try_alone(self, row: SequenceState) -> None:
        """A batch with this row in it failed. A round by itself shows whether it was this one."""
        assert row.batch is not None
        self._tell(describe(self.model, row.batch, [row], row.drafter.ceiling).start())
        row.suspect, row.cleared = False, True
        self._recompute(row, "failure")

    def _make_room(self) -> None:
        """Answers grow. Where they outgrow the memory, the youngest waits until there is some again."""
        while len(self.rows) > 1 and self._batch is not None:
            if self.footprint.bytes([bound + MAX_K + 1 for bound in self._batch.rows.bounds]) <= self.memory:
                return
            youngest = max(self.rows, key=lambda row: row.started)
            self._batch.keep([i for i, row in enumerate(self.rows) if row is not youngest], self.model)
            self.rows.remove(youngest)
            self._recompute(youngest, "memory")
            self.queue.put_back(youngest)
            self._steady = False

    def _attempt(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:
            self._recover(error)

    def _step(self) -> None:
        """Start the next step, and tell what the one in flight said."""
        waits = self._waits()
        if waits or (not self._ahead and self._ends()):
            self._land()
        self._make_room()
        following = self._describe()
        if following is not None and self._ahead:
            following.start()
        self._land()
        if self._batch is None:  # all have ended
            following = None
        elif following is not None and not self._ahead:
            following.start()
        self._flight = following
        if waits:
            self._land()

    def _waits(self) -> bool:
        """Whether a round must be known before another is described."""
        return any(row.matcher for row in self.rows)

    def _ends(self) -> bool:
        """Whether the round in flight is known to end a row, which need not be in another then."""
        return self._flight is not None and any(row.said + 1 >= row.limit for row in self._flight.rows)

    def _describe(self) -> PendingStep | None:
        """The next step, before the last one is known. Rows that the round in flight must end are surplus; where all
        are, there is none."""
        flying = self._flight.rows if self._flight is not None else []
        if self._batch is None or all(row in flying and row.said + 1 >= row.limit for row in self.rows):
            return None
        # Drafts that no row has room for would cost time and stand nowhere. A depth that a request insists on is a
        # ceiling for itself and nothing to others: where one leaves it open, the choice is made for all.
        room = max(row.limit - row.said - (row in flying) - 1 for row in self.rows)
        if any(row.auto for row in self.rows):
            k = self.depth.choose([row.drafter for row in self.rows])
        else:
            k = max(row.fixed for row in self.rows)
        k = min(k, room, widest(len(self.rows)))
        flight = describe(self.model, self._batch, self.rows, k, steady=self._steady)
        self._steady = True
        return flight

    def _land(self) -> None:
        """Wait for the round in flight, if there is one, and tell every row what it said."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._tell(flight)

    def _tell(self, flight: PendingStep) -> None:
        report: list[list[int]] = flight.report.tolist()  # type: ignore[assignment]  # the one synchronisation
        self._learn(flight, report)
        for index, (row, numbers) in enumerate(zip(flight.rows, report, strict=True)):
            if row.over:
                continue
            if not numbers[-1]:
                row.fail(HeadstartError("the model's logits are not finite: this row cannot go on"))
                continue
            if row.matcher is not None and row.matcher.failed is not None:
                row.fail(row.matcher.failed)
                continue
            said = flight.said(index, numbers)
            if self._batch is not None and row in self.rows:
                self._batch.rows.bounds[self.rows.index(row)] -= flight.k - said.accepted
            try:
                row.say(said)
            except Exception as error:  # of its text or its grammar
                row.fail(error)
        self._drop_finished()

    def _learn(self, flight: PendingStep, report: list[list[int]]) -> None:
        """Tell the choice of depth what came of this one. A round's time runs from the landing before it."""
        now = time.perf_counter()
        seconds, self._landed = now - (self._landed if flight.steady else flight.begun), now
        running = [
            (row, (numbers[-3], numbers[-2]))
            for row, numbers in zip(flight.rows, report, strict=True)
            if not row.over
        ]
        outcomes = [outcome for _, outcome in running]
        timed = seconds if flight.steady and len(running) == len(flight.rows) else None
        self.depth.observe([row.drafter for row, _ in running], flight.k, outcomes, timed)
        for row, _ in running:
            row.stats.count_depth(min(flight.k, row.drafter.ceiling), seconds)
            if row.auto:
                row.stats.estimated_gain_by_k = list(self.depth.gains)
                if flight.k == 0:
                    row.stats.last_pause_reason = pause_reason(self.depth.gains)

    def _recover(self, error: Exception) -> None:
        """A step failed, and took the rows' memory with it. Where memory ran out, the youngest ends. Otherwise
        nobody can tell whose fault it is until each has run a round alone; if none fails there, the youngest ends."""
        rows = [row for row in self.rows if not row.over]
        shortage = is_shortage(error)
        if rows and (len(rows) == 1 or shortage or all(row.cleared for row in rows)):
            youngest = max(rows, key=lambda row: row.started)
            youngest.finish("error", error)
            rows.remove(youngest)
        report(LOG, "a step failed; %d sequences will be recomputed", len(rows), error=error)
        self.retries += bool(rows)
        for row in rows:
            row.suspect = not shortage and not row.cleared
        if shortage:
            self._empty_prefix()
        self._enter_again(rows, "memory" if shortage else "failure")

    def _enter_again(self, rows: list[SequenceState], reason: str) -> None:
        self._forget_batch()
        for row in rows:
            self._recompute(row, reason)
        self.entering.extendleft(reversed(rows))

    def _recompute(self, row: SequenceState, reason: str) -> None:
        """Drop what the device holds of a sequence: its tokens so far will be prefilled again."""
        self.recomputed[reason] += 1
        row.reset_prefill()

    def _forget_batch(self) -> None:
        self.rows, self._batch, self._flight, self._steady = [], None, None, False
        mx.clear_cache()

    def _drop_finished(self) -> None:
        staying = [i for i, row in enumerate(self.rows) if not row.over]
        if self._batch is None or len(staying) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in staying]
        if not self.rows:
            self._batch = None
            return
        self._steady = False
        self._batch.keep(staying, self.model)
        if self._batch.head is not None and not any(row.drafter.ceiling for row in self.rows):
            self._batch.forget_head(self.model)
