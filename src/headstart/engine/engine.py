"""The engine: sequences join a batch, decode together, and leave. One thread calls `run_once` again and again.

An iteration admits requests, prefills at most one chunk of a prompt, builds a step for all running sequences,
launches it, and hands out the tokens of the step before while the device works. So the host waits once per step and
notices the end of a sequence one step late; the surplus round is discarded.

A sequence can always be recomputed from its tokens, and continues bit for bit as it would have (on CUDA, where
prompts use other kernels, up to rounding, and its stats say so). So when memory runs short the youngest sequence is
requeued, and a step that fails costs its sequences time, not their answers.
"""

import time
from collections import deque
from threading import Lock
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import HeadstartError
from ..limits import MAX_K
from ..models import Model
from ..state import PrefixCache
from ..thread_exit import wait_at_exit
from .batch import Batch
from .depth import DepthController, Plan, pause_reason
from .device_error import is_failed_command
from .invariance import invariant_k, is_batch_invariant
from .log import LOG, log_error
from .memory import wire_weights
from .pending_step import PendingStep, build_step
from .prefill import prefill_chunk
from .recovery import Recovery
from .sequence import SequenceState, not_finite, youngest
from .step_time import BUDGET, CALIBRATION_BATCH, WARM_UP_BUDGET, time_steps

_controllers: WeakKeyDictionary[Model, DepthController] = WeakKeyDictionary()


class Engine(Recovery):
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
    ):
        """Make an engine for a model.

        Args:
            tokenizer: For text in events, end tokens, stop strings and grammars.
            max_sequences: Most sequences that run at a time.
            max_queue: Most requests that wait; no limit if None.
            memory_limit: Bytes for the states of all sequences; by default what the device has left.
            depth: Chooses k for requests with k = "auto". By default the model's, which first times a few steps.
            prefix: The prefix cache, if any.
        """
        super().__init__(model, tokenizer, max_sequences, max_queue, memory_limit, prefix)
        wire_weights(model)
        self.depth = depth or _controllers.setdefault(model, DepthController.of(model))
        self._ahead = model.backend.asynchronous  # a step is launched while the one before is still running
        self._lock = Lock()  # held during an iteration
        self._batch: Batch | None = None
        self._pending: PendingStep | None = None
        self._last_finish = 0.0  # when the tokens of the last step were read
        self._steady = False  # the next step will follow the last without other device work

    @property
    def busy(self) -> bool:
        return bool(self.prefilling or self.running or self._pending or len(self.queue))

    def run_once(self) -> bool:
        """Do one iteration. Return False when nothing is left to do."""
        wait_at_exit()
        with self._lock, self.model.backend.device():
            self._end_cancelled()
            self._drop_finished()
            self._admit()
            try:
                if self.prefilling and not self._ahead:  # generated tokens do not wait for another's prefill
                    self._finish_pending()
                self._prefill_chunk()
                self._step()
            except Exception as error:
                self._recover(error)
        return self.busy

    def warm_up(self) -> None:
        """Do the measurements that the first request would otherwise wait for. Call it before `run_once`."""
        is_batch_invariant(self.model)
        self._calibrate(WARM_UP_BUDGET)

    def prefill_all(self) -> None:
        """Prefill all requests that can be admitted, so that they start to decode together."""
        with self._lock:
            self._admit()
            while self.prefilling:
                self._prefill_chunk()

    def end_all(self, error: HeadstartError) -> None:
        """End all requests with an error, when `run_once` will not be called again."""
        for sequence in self._unfinished():
            sequence.finish("error", error)
        self.queue.remove_finished()
        self.prefilling.clear()
        self._drop_batch()

    def _calibrate(self, budget: float = BUDGET) -> None:
        """Time a few steps, if the model's shared controller knows nothing yet."""
        if self.depth is _controllers.get(self.model) and not self.depth.step_time.timings:
            fits = self.footprint.bytes([1] * CALIBRATION_BATCH) <= self.memory
            times = time_steps(self.model, self.depth.max_k, self.max_sequences if fits else 1, budget)
            self.depth.step_time.calibrate(times)

    def _prefill_chunk(self) -> None:
        """Prefill one chunk of one sequence: with more, running sequences would stall."""
        if not self.prefilling:
            return
        sequence = self.prefilling[0]
        try:
            if sequence.batch is None and sequence.auto_depth:
                self._calibrate()
        except Exception as error:  # of its throw-away sequences: this one may be fine
            log_error(LOG, "calibration failed; step times are learned while decoding", error=error)
        try:
            self._steady = False
            if not prefill_chunk(self.model, sequence, self.prefix, self.turn_marker, self.widest_pass):
                return
            if sequence.suspect:
                self._try_alone(sequence)
            else:
                self._join(sequence)
                self.prefilling.popleft()
        except Exception as error:
            self._prefill_failed(sequence, error)
        self.prefilling = deque(sequence for sequence in self.prefilling if not sequence.finished)

    def _join(self, sequence: SequenceState) -> None:
        """Add a prefilled sequence and its siblings to the running batch."""
        assert sequence.batch is not None
        sequences = sequence.fork()
        if len(sequences) > 1:
            sequence.batch.fork([each.params for each in sequences], self.model)
        if self._batch is None:
            self._batch = sequence.batch
        else:
            self._batch.join(sequence.batch, self.model)
        sequence.batch = None
        self._steady = False
        self.running += sequences

    def _try_alone(self, sequence: SequenceState) -> None:
        """Run a step of this sequence alone, after a batch with it failed, to find out whether it is the cause."""
        assert sequence.batch is not None
        pending = build_step(self.model, sequence.batch, [sequence], Plan.fixed(self.model, sequence.history.max_k))
        pending.start()
        self._emit(pending)
        sequence.suspect, sequence.cleared = False, True
        self._recompute(sequence, "failure")

    def _step(self) -> None:
        """Launch the next step, and hand out the tokens of the pending one: after that on a GPU, before it on a CPU,
        where a launch runs the step. With a grammar, each step is read before the next is built."""
        synchronous = self._is_synchronous()
        if synchronous or (not self._ahead and (self._pending_ends_a_sequence() or self._is_copying())):
            self._finish_pending()
        self._requeue_for_memory()
        following = self._next_step()
        if following is not None and self._ahead:
            following.start()
        self._finish_pending()
        if following is not None and self._batch is not None:  # some sequences have not ended
            if not self._ahead:
                following.start()
            self._pending = following
        if synchronous:
            self._finish_pending()

    def _is_synchronous(self) -> bool:
        """Return whether the tokens of a step must be known before the next one is built."""
        return any(sequence.matcher for sequence in self.running)

    def _pending_ends_a_sequence(self) -> bool:
        return self._pending is not None and any(s.limit <= s.num_generated + 1 for s in self._pending.sequences)

    def _is_copying(self) -> bool:
        """Return whether a sequence repeats earlier tokens: to know whether it still does is worth a short wait."""
        return any(sequence.copies is not None and sequence.copies.distance for sequence in self.running)

    def _requeue_for_memory(self) -> None:
        """Requeue the youngest sequences while the next step of the batch would not fit into memory."""
        while len(self.running) > 1 and self._batch is not None:
            if self.footprint.bytes([bound + MAX_K + 1 for bound in self._batch.trunk_state.bounds]) <= self.left:
                return
            last = youngest(self.running)
            self._batch.keep([i for i, each in enumerate(self.running) if each is not last], self.model)
            self.running.remove(last)
            self._recompute(last, "memory")
            self.queue.put_back(last)
            self._steady = False

    def _next_step(self) -> PendingStep | None:
        """Build the next step, without the tokens of the pending one. None if no sequence can need it."""
        if self._batch is None:
            return None
        pending = self._pending.sequences if self._pending is not None else []
        # The pending step generates at least one token per sequence. More drafts than any can still use are a waste.
        remaining = max(each.limit - each.num_generated - (each in pending) for each in self.running)
        if remaining <= 0:
            return None
        # A fixed k is a limit for its own sequence only: if any sequence leaves k open, the controller chooses.
        if any(sequence.auto_depth for sequence in self.running):
            plan = self._choose()
        else:
            plan = Plan.fixed(self.model, max(sequence.history.max_k for sequence in self.running))
        plan = plan._replace(k=invariant_k(self.model, self.running, min(plan.k, remaining - 1)))
        following = build_step(self.model, self._batch, self.running, plan, steady=self._steady)
        self._steady = True
        return following

    def _choose(self) -> Plan:
        copies = [sequence.find_copies(self.depth.copy_pool) for sequence in self.running]
        unread = self._pending.k + 1 if self._pending is not None else 0
        return self.depth.plan([sequence.history for sequence in self.running], copies, unread)

    def _finish_pending(self) -> None:
        """Wait for the pending step, if there is one, and hand out its tokens."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._emit(pending)

    def _emit(self, pending: PendingStep) -> None:
        report = pending.read()
        self._observe(pending, report)
        for index, sequence in enumerate(pending.sequences):
            *tokens, accepted, proposed, copied, finite = report[index]
            if sequence.finished:
                continue
            try:
                if not finite:
                    raise not_finite(self.model)
                if sequence.matcher is not None and sequence.matcher.failed is not None:
                    raise sequence.matcher.failed
                if self._batch is not None and sequence in self.running:
                    # `commit` raised the bound as if all drafts were accepted.
                    self._batch.trunk_state.bounds[self.running.index(sequence)] -= pending.k - accepted
                pending.emit(index, tokens[: accepted + 1], proposed, copied)
            except Exception as error:
                if is_failed_command(error):
                    raise
                sequence.fail(error)
        self._drop_finished()

    def _observe(self, pending: PendingStep, report: list[list[int]]) -> None:
        """Count the step, and tell the depth controller its outcome. Steady steps are timed from end to end."""
        now = time.perf_counter()
        seconds = now - (self._last_finish if pending.steady else pending.started)
        self._last_finish = now
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
            sequence.stats.count_depth(min(pending.k, sequence.max_k), seconds)
            if sequence.auto_depth:
                sequence.stats.estimated_gain_by_k = list(self.depth.gains)
                if pending.k == 0:
                    sequence.stats.last_pause_reason = pause_reason(self.depth.gains)

    def _drop_batch(self) -> None:
        self.running = []
        self._batch = self._pending = None
        self._steady = False
        mx.clear_cache()

    def _drop_finished(self) -> None:
        """Remove finished sequences from the batch."""
        staying = [i for i, sequence in enumerate(self.running) if not sequence.finished]
        if self._batch is None or len(staying) == len(self.running):
            return
        self.running = [self.running[i] for i in staying]
        if not self.running:
            self._batch = None
            return
        self._steady = False
        self._batch.keep(staying, self.model)
