"""The engine: sequences join a batch, decode together, and leave. One thread calls `run_once` again and again.

An iteration admits requests, reads a slice of their prompts (`slices.py`), builds a step for all running sequences,
launches it, and hands out the tokens of the step before while the device works. So the host waits once per step and
notices the end of a sequence one step late; the surplus round is discarded.

A sequence can always be recomputed from its tokens, and continues bit for bit as it would have. So when memory runs
short the youngest sequence is requeued, and a step that fails costs its sequences time, not their answers.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock
from types import NoneType
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..error_log import LOG, log_error
from ..errors import ClusterError, HeadstartError, RequestError, check_type
from ..limits import MAX_K
from ..models import Model
from ..state import PrefixCache
from ..thread_exit import wait_at_exit
from .decisions import Decisions
from .depth import DepthController, Plan, pause_reason
from .device_error import is_failed_command
from .invariance import is_batch_invariant
from .limit import fixed_plan, step_limit
from .memory import memory_for_prefixes, wire_weights
from .pending_step import PendingStep, build_step
from .prompt_reader import PromptReader
from .recovery import Recovery
from .request import Event, Handle, Request
from .scheduler import Scheduler
from .sequence import SequenceState, not_finite
from .step_time import BUDGET, CALIBRATION_BATCH, WARM_UP_BUDGET, time_steps
from .streams import BorrowedStream
from .turns import TurnMarker

_controllers: WeakKeyDictionary[Model, DepthController] = WeakKeyDictionary()
_prefixes: WeakKeyDictionary[Model, PrefixCache] = WeakKeyDictionary()


class Engine:
    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper | None = None,
        *,
        max_sequences: int = 16,
        max_queue: int | None = None,
        memory_limit: int | None = None,
        depth: DepthController | None = None,
        prefix: PrefixCache | None = None,
        decisions: Decisions | None = None,
    ):
        """Make an engine for a model.

        Args:
            tokenizer: For text in events, end tokens, stop strings and grammars.
            max_sequences: Most sequences that run at a time.
            max_queue: Most requests that wait; no limit if None.
            memory_limit: Bytes for the states of all sequences; by default what the device has left.
            depth: Chooses k for requests with k = "auto". By default the model's, which first times a few steps.
            prefix: The prefix cache. By default the model's, which its engines share; PrefixCache(0) for none.
            decisions: Of several machines, which decide together; by default of this engine alone.
        """
        check_type(model, Model, "model", "load it with headstart.load")
        check_type(tokenizer, (TokenizerWrapper, NoneType), "tokenizer", "load it with headstart.load")
        check_type(prefix, (PrefixCache, NoneType), "prefix", "make a PrefixCache")
        check_type(max_sequences, int, "max_sequences", "give a whole number")
        self.decisions = decisions or Decisions()
        max_sequences = min(max_sequences, model.most_sequences or max_sequences)
        if not model.keeps_prefixes:
            prefix = None
        elif prefix is None and self.decisions.alone:  # several machines share one, or have none
            prefix = _prefixes.setdefault(
                model, PrefixCache(memory_for_prefixes(), chunk=model.reading.backend.chunk)
            )
        self.prefix = prefix if prefix is not None and prefix.max_bytes else None
        reserved = self.prefix.max_bytes - self.prefix.stats().bytes if self.prefix is not None else 0
        self.scheduler = Scheduler(model, max_sequences, max_queue, memory_limit, reserved)
        wire_weights(model)
        self.model = model
        self.tokenizer = tokenizer
        self.turn_marker = TurnMarker.of(tokenizer)
        self.recovery = Recovery(self.scheduler, self.prefix, model.reading.backend)
        self.depth = depth or _controllers.setdefault(model, DepthController.of(model))
        self.threaded = False  # if True, another thread calls `run_once`; else iterating a handle does
        self.runs_ahead = model.backend.asynchronous  # a step is launched while the one before is still running
        self._borrowed: BorrowedStream | None = None  # while there is work that any thread may do
        self._lock = RLock()  # held during an iteration
        self.broken = False  # an iteration was left in the middle, by Ctrl-C or a lost device
        self._last_finish = 0.0  # when the tokens of the last step were read
        parts = self.scheduler, self.recovery, self.decisions, self.prefix, self.turn_marker
        self.reader = PromptReader(model, *parts, self._try_alone)
        self.decisions.begin(self)

    def submit(
        self,
        request: Request,
        *,
        client: str = "",
        listener: Callable[[Event], None] | None = None,
        max_k: int = MAX_K,
    ) -> Handle:
        """Queue a request, from any thread.

        Args:
            client: Whose request it is. Clients take turns.
            listener: Receives every event in the thread that runs the engine, instead of the handle.
            max_k: Most drafts per round, besides what the model and the request allow.

        Raises:
            RequestError: It can never be answered.
            Busy: The queue is full.
        """
        if request.adapter is None and self.model.default_adapter is not None:
            request = replace(request, adapter=self.model.default_adapter)
        request.check(self.model)
        if request.n > (most := self.scheduler.max_sequences):
            raise RequestError(f"n is {request.n}, and at most {most} answers can run at a time")
        handle = Handle(request, None if self.threaded else self.run_once, listener)
        self.scheduler.put(SequenceState.of(handle, self.model, self.tokenizer, max_k), client)
        return handle

    def cancel_all(self) -> None:
        """Cancel all requests, also those submitted later, from any thread."""
        self.scheduler.cancels_all = True

    def clear_prefix(self) -> None:
        """Empty the prefix cache, from any thread."""
        with self._lock:
            self.decisions.clear_prefix()
            if self.prefix is not None:
                self.prefix.clear()

    def close(self) -> None:
        """Write what the prefix cache on the disk is still to get. Requests have ended."""
        if self.prefix is not None:
            self.prefix.close()

    def run_once(self) -> bool:
        """Do one iteration. Return False when nothing is left to do."""
        wait_at_exit()
        with self._lock, self.decisions.iteration(), self._on_device():
            try:
                self._iterate()
            except BaseException:
                self.broken = True
                raise
        return self.scheduler.busy

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Run on the engine's stream: what one thread leaves unevaluated another can then go on with."""
        with self.model.backend.device():
            if self.threaded:
                yield
                return
            self._borrowed = self._borrowed or BorrowedStream(self)
            with mx.stream(self._borrowed.stream):
                yield
            if self._borrowed is not None and not self.scheduler.busy:
                self._borrowed.give_back()
                self._borrowed = None

    def _iterate(self) -> None:
        scheduler = self.scheduler
        scheduler.cancel(self.decisions.cancelled(scheduler.asked_to_cancel()))
        self.decisions.admit(scheduler)
        try:
            if scheduler.prefilling and not self.runs_ahead:  # generated tokens do not wait for another's prefill
                self._finish_pending()
            self._calibrate_for_prompts()
            self.reader.read(runs_ahead=self.runs_ahead, meanwhile=self._finish_pending)
            self._step()
        except Exception as error:
            if not self.decisions.alone:
                raise
            self.recovery.after_step(error)

    def warm_up(self) -> None:
        """Do the measurements that the first request would otherwise wait for. Call it before `run_once`."""
        with self.decisions.iteration():
            is_batch_invariant(self.model)
            self._calibrate(WARM_UP_BUDGET)

    def prefill_all(self) -> None:
        """Prefill all requests that can be admitted, so that they start to decode together."""
        if not self.decisions.alone:
            raise ClusterError("prefill_all is not available on several machines: use one")
        with self._lock, self._on_device():
            self.scheduler.admit()
            self._calibrate_for_prompts()
            while self.scheduler.prefilling:
                self.reader.read_pass()

    def end_all(self, error: HeadstartError) -> None:
        """End all requests with an error, when `run_once` will not be called again."""
        self.scheduler.end_all(error)

    def _calibrate(self, budget: float = BUDGET) -> None:
        """Time a few steps, if the model's shared controller knows nothing yet."""
        if self.depth is _controllers.get(self.model) and not self.depth.step_time.timings:
            scheduler = self.scheduler
            fits = scheduler.footprint.bytes([1] * CALIBRATION_BATCH) <= scheduler.memory
            times = time_steps(self.model, self.depth.max_k, scheduler.max_sequences if fits else 1, budget)
            self.depth.step_time.calibrate(times)

    def _calibrate_for_prompts(self) -> None:
        """Time a few steps before the first prompt whose sequence leaves k open."""
        if any(sequence.batch is None and sequence.auto_depth for sequence in self.scheduler.prefilling):
            try:
                self._calibrate()
            except Exception as error:  # of its throw-away sequences: these may be fine
                log_error(LOG, "calibration failed; step times are learned while decoding", error=error)

    def _try_alone(self, sequence: SequenceState) -> None:
        """Run a step of this sequence alone, after a batch with it failed, to find out whether it is the cause."""
        assert sequence.batch is not None
        pending = build_step(self.model, sequence.batch, [sequence], fixed_plan(self.model, [sequence]))
        pending.start()
        self._emit(pending)
        sequence.suspect, sequence.cleared = False, True
        self.recovery.recompute(sequence, "failure")

    def _step(self) -> None:
        """Launch the next step, and hand out the tokens of the pending one: after that on a GPU, before it on a CPU,
        where a launch runs the step. With a grammar, each step is read before the next is built."""
        running = self.scheduler.running
        synchronous = self._is_synchronous()
        if synchronous or (not self.runs_ahead and (self._pending_ends_a_sequence() or self._is_copying())):
            self._finish_pending()
        for sequence in self.scheduler.requeue_for_memory():
            self.recovery.recompute(sequence, "memory")
        following = self._next_step()
        if following is not None and self.runs_ahead:
            following.start()
        self._finish_pending()
        if following is not None and running.batch is not None:  # some sequences have not ended
            if not self.runs_ahead:
                following.start()
            running.pending = following
        if synchronous:
            self._finish_pending()

    def _is_synchronous(self) -> bool:
        """Return whether the tokens of a step must be known before the next one is built."""
        compared = not (self.decisions.alone or self.runs_ahead)
        return compared or any(sequence.matcher for sequence in self.scheduler.running.sequences)

    def _pending_ends_a_sequence(self) -> bool:
        pending = self.scheduler.running.pending
        return pending is not None and any(s.limit <= s.num_generated + 1 for s in pending.sequences)

    def _is_copying(self) -> bool:
        """Return whether a sequence repeats earlier tokens: to know whether it still does is worth a short wait."""
        running = self.scheduler.running.sequences
        return any(sequence.copies is not None and sequence.copies.distance for sequence in running)

    def _next_step(self) -> PendingStep | None:
        """Build the next step, without the tokens of the pending one. None if no sequence can need it."""
        running = self.scheduler.running
        if running.batch is None:
            return None
        pending = running.pending.sequences if running.pending is not None else []
        # The pending step generates at least one token per sequence.
        remaining = max(each.limit - each.num_generated - (each in pending) for each in running.sequences)
        if remaining <= 0:
            return None
        most = step_limit(self.model, running.sequences)
        # A fixed k is a limit for its own sequence only: if any sequence leaves k open, the controller chooses.
        if any(sequence.auto_depth for sequence in running.sequences):
            plan = self.decisions.plan(lambda: self._choose(most))
        else:
            plan = fixed_plan(self.model, running.sequences, most)
        plan = plan._replace(k=min(plan.k, most, remaining - 1))  # more than any sequence can still use are a waste
        following = build_step(self.model, running.batch, running.sequences, plan, steady=running.steady)
        running.steady = True
        return following

    def _choose(self, most: int) -> Plan:
        running = self.scheduler.running
        copies = [sequence.find_copies(self.depth.copy_pool) for sequence in running.sequences]
        unread = running.pending.k + 1 if running.pending is not None else 0
        return self.depth.plan([sequence.history for sequence in running.sequences], copies, unread, most)

    def _finish_pending(self) -> None:
        """Wait for the pending step, if there is one, and hand out its tokens."""
        running = self.scheduler.running
        pending, running.pending = running.pending, None
        if pending is not None:
            self._emit(pending)

    def _emit(self, pending: PendingStep) -> None:
        report = pending.read()
        self._observe(pending, report)
        running = self.scheduler.running
        for index, sequence in enumerate(pending.sequences):
            *tokens, accepted, proposed, copied, finite = report[index]
            if sequence.finished:
                continue
            try:
                if not finite:
                    raise not_finite(self.model)
                if sequence.matcher is not None and sequence.matcher.failed is not None:
                    raise sequence.matcher.failed
                running.correct_length(sequence, pending.k - accepted)
                pending.emit(index, tokens[: accepted + 1], proposed, copied)
            except Exception as error:
                if is_failed_command(error):
                    raise
                sequence.fail(error)
        running.drop_finished()

    def _observe(self, pending: PendingStep, report: list[list[int]]) -> None:
        """Count the step, and tell the depth controller its outcome. Steady steps are timed from end to end."""
        now = time.perf_counter()
        seconds = now - (self._last_finish if pending.steady else pending.started)
        self._last_finish = now
        self.reader.observe_step(pending.started, now)
        running, outcomes, listed = [], [], self.model.draft_vocabulary
        for sequence, line in zip(pending.sequences, report, strict=True):
            if not sequence.finished:
                running.append(sequence)
                outcomes.append(pending.outcome(line, listed))
                if listed is not None:
                    self.depth.observe_coverage(*listed.count(line[: outcomes[-1][0] + 1]))
        timed = seconds if pending.steady and len(running) == len(pending.sequences) else None
        histories = [sequence.history for sequence in running]
        self.depth.observe(histories, pending.k, outcomes, timed, pending.plan.source)
        for sequence in running:
            sequence.stats.count_depth(min(pending.k, sequence.limits.most), seconds)
            if sequence.auto_depth:
                sequence.stats.estimated_gain_by_k = list(self.depth.gains)
                if pending.k == 0:
                    sequence.stats.last_pause_reason = pause_reason(self.depth.gains)
        self.decisions.observe(report)
