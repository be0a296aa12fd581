"""Rows come, decode together, and go. One thread owns the device and calls `turn` again and again.

A turn admits requests, takes in at most one chunk of a prompt, launches a step for all running rows, and, while
the device works on it, hands out what the step before said. So the host waits once a step, and learns of an end
one step late: the surplus round of a finished row counts nowhere. Only where a row has a grammar must the host know
what was said before it can tell what may follow, and so waits before it launches.
"""

import secrets
import time
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Lock
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..errors import HeadstartError, RequestError
from ..models import Model
from ..sampling import MAX_K, Asked, Guide, Logprobs, Matcher, compile_grammar
from .batch import Batch
from .depth import Depth, Drafter
from .exact import rows_are_independent
from .request import Event, FinishReason, Handle, Request, TokenLogprobs
from .stats import Stats, origins
from .step import prefill, step
from .text import TextStream

CHUNK = 512  # tokens of a prompt between two steps, at fixed multiples

_depths: WeakKeyDictionary[Model, Depth] = WeakKeyDictionary()


@dataclass(eq=False)
class Row:
    """The host's side of a sequence."""

    handle: Handle
    asked: Asked
    drafter: Drafter  # what is known of its drafts
    stats: Stats
    text: TextStream | None
    matcher: Matcher | None  # of its grammar
    batch: Batch | None = None  # its own while its prompt is taken in
    taken: int = 0  # tokens of the prompt that are in
    started: float = 0.0
    over: bool = False

    @property
    def fixed(self) -> int:
        """The depth that its request insists on."""
        k = self.asked.params.k
        return 0 if k == "auto" else self.drafter.ceiling

    @property
    def said(self) -> int:
        return self.stats.generation_tokens

    @property
    def limit(self) -> int:
        return self.asked.limit


@dataclass
class Flight:
    """A round that the device is working on, and the rows that are in it."""

    rows: list[Row]
    k: int
    begun: float
    steady: bool  # nothing but this step is between the landing before and this one
    report: mx.array  # [B, k+4]: tokens, accepted, proposed, finite
    logits: mx.array | None  # [B, k+1, V], if a row wants them
    logprobs: Logprobs | None


class Engine:
    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper | None = None,
        *,
        max_rows: int = 16,
        threaded: bool = False,
        depth: Depth | None = None,
    ):
        """With a tokenizer, events carry text, its end tokens end an answer, and stop strings and grammars work.

        `threaded`: another thread turns the engine; otherwise whoever waits for an event does. `depth` chooses k for
        requests that leave it open; by default what was learned of this model so far goes on to be used.
        """
        if max_rows < 1:
            raise RequestError(f"max_rows is {max_rows}; it must be at least 1")
        maybe_set_recommended_wired_limit()  # Metal: keep the weights resident
        self.model = model
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.depth = depth or _depths.setdefault(model, Depth())
        self._threaded = threaded
        self._lock = Lock()
        self._queue: deque[Row] = deque()  # submitted, not admitted
        self._entering: deque[Row] = deque()  # taking in their prompts
        self._rows: list[Row] = []  # decoding, in the order of the batch
        self._batch: Batch | None = None
        self._flight: Flight | None = None
        self._landed = 0.0  # when the last round was known
        self._steady = False

    def submit(self, request: Request) -> Handle:
        """Queue a request, from any thread. Raises RequestError where it cannot be honoured."""
        request.check(self.model)
        params, model = request.params, self.model
        text = None
        if self.tokenizer is not None:
            ends = {token for token in self.tokenizer.eos_token_ids if token < model.vocabulary}
            params = replace(params, stop_ids=frozenset(params.stop_ids) | ends)
            text = TextStream(self.tokenizer, params.stop)
        elif params.stop:
            raise RequestError("stop needs text, and this engine has no tokenizer: use stop_ids")
        matcher = None
        if params.grammar is not None:
            if self.tokenizer is None:
                raise RequestError("grammar needs text, and this engine has no tokenizer: give it the model's")
            matcher = compile_grammar(params.grammar, self.tokenizer).matcher(params.stop_ids, model.vocabulary)
        ceiling, bypass = 0, None
        if not model.has_head:
            bypass = model.head_unavailable or "the model has no head"
        elif params.k == 0:
            bypass = "k is 0"
        else:
            ceiling = MAX_K if params.k == "auto" else params.k
        limit = min(params.max_tokens, model.context_length - len(request.prompt))
        # Unseeded rows differ from each other and from run to run.
        key = params.seed if params.seed is not None else secrets.randbits(64)
        asked = Asked(params, key, request.choice, limit)
        handle = Handle(request, None if self._threaded else self.turn)
        stats = Stats("native_mtp" if ceiling else None, bypass, prompt_tokens=len(request.prompt))
        with self._lock:
            self._queue.append(Row(handle, asked, Drafter(ceiling), stats, text, matcher))
        return handle

    def turn(self) -> bool:
        """One turn. False when nothing is left to do."""
        self._drop_cancelled()
        self._admit()
        self._take_in_a_chunk()
        try:
            landed = self._flight
            if landed is not None and any(row.matcher for row in self._rows):
                self._land(landed)
                landed = self._flight = None
            self._flight = self._launch()
            if landed is not None:
                self._land(landed)
        except Exception as error:  # of the whole batch: nobody can tell whose it is
            self._abandon(error)
        return bool(self._queue or self._entering or self._rows or self._flight)

    def _drop_cancelled(self) -> None:
        with self._lock:
            waiting = [row for row in self._queue if row.handle.cancelled]
            self._queue = deque(row for row in self._queue if not row.handle.cancelled)
        for row in waiting + [row for row in (*self._entering, *self._rows) if row.handle.cancelled]:
            self._finish(row, "cancelled")
        self._entering = deque(row for row in self._entering if not row.over)
        self._drop_finished()

    def _admit(self) -> None:
        with self._lock:
            while self._queue and len(self._rows) + len(self._entering) < self.max_rows:
                self._entering.append(self._queue.popleft())

    def _take_in_a_chunk(self) -> None:
        """At most one chunk of one prompt, so that running rows do not stall. All but its last token is taken in:
        that one opens the first window."""
        if not self._entering:
            return
        row = self._entering[0]
        prompt = row.handle.request.prompt
        end = min((row.taken // CHUNK + 1) * CHUNK, len(prompt) - 1)
        try:
            if row.batch is None:
                row.stats.exact = rows_are_independent(self.model) and row.asked.params.rule != "optimistic"
                row.batch = Batch.of_one(self.model, prompt, row.asked, row.drafter.ceiling)
                row.started = time.perf_counter()
            if row.taken:  # one chunk at a time: progress is real, memory bounded, and a cancel soon heeded
                mx.eval(row.batch.arrays())
                row.handle.put(Event(stats=deepcopy(row.stats), prompt_taken=row.taken))
            if end > row.taken:
                tokens = mx.array([prompt[row.taken : end]], mx.int32)
                prefill(self.model, row.batch, tokens, mx.array([prompt[end]], mx.int32))
                mx.async_eval(row.batch.arrays())
                row.taken, self._steady = end, False
            if end == len(prompt) - 1:
                self._join(row)
                self._entering.popleft()
        except Exception as error:  # a row that fails ends alone
            self._entering.remove(row)
            self._finish(row, "error", error)

    def _join(self, row: Row) -> None:
        assert row.batch is not None
        if self._batch is None:
            self._batch = row.batch
        else:
            self._batch.join(row.batch, self.model)
        row.batch, self._steady = None, False
        self._rows.append(row)

    def _launch(self) -> Flight | None:
        """Start the next step before the last one is known. Rows that the round in flight must end are surplus;
        where all are, there is nothing to start."""
        flying = self._flight.rows if self._flight is not None else []
        if self._batch is None or all(row in flying and row.said + 1 >= row.limit for row in self._rows):
            return None
        begun = time.perf_counter()
        k = max(row.fixed for row in self._rows)
        if any(row.asked.params.k == "auto" for row in self._rows):
            k = max(k, self.depth.choose([row.drafter for row in self._rows]))
        matchers = [row.matcher for row in self._rows]
        guide = Guide(matchers, self.model.vocabulary) if any(matchers) else None
        round = step(self.model, self._batch, k, guide)
        columns = [round.accepted, round.proposed, round.finite.astype(mx.int32)]
        report = mx.concatenate([round.tokens, mx.stack(columns, axis=1)], axis=1)
        wanted = any(row.handle.request.keep_logits for row in self._rows)
        also = [*(round.logprobs or ()), *([round.logits] if wanted else [])]
        mx.async_eval(report, *also, *self._batch.arrays())
        steady, self._steady = self._steady, True
        logits = round.logits if wanted else None
        return Flight(list(self._rows), k, begun, steady, report, logits, round.logprobs)

    def _land(self, flight: Flight) -> None:
        """Wait for a round, and tell every row what it said."""
        report: list[list[int]] = flight.report.tolist()  # type: ignore[assignment]  # the one synchronisation
        self._learn(flight, report)
        for index, (row, numbers) in enumerate(zip(flight.rows, report, strict=True)):
            if row.over:
                continue
            *tokens, accepted, proposed, finite = numbers
            if not finite:
                self._finish(row, "error", HeadstartError("the model's logits are not finite: this row cannot go on"))
                continue
            if row.matcher is not None and row.matcher.failed is not None:
                self._finish(row, "error", row.matcher.failed)
                continue
            assert self._batch is not None
            self._batch.rows.bounds[self._rows.index(row)] -= flight.k - accepted
            try:
                self._say(row, tokens[: accepted + 1], accepted, proposed, flight, index)
            except Exception as error:  # of its text or its grammar
                self._finish(row, "error", error)
        self._drop_finished()

    def _learn(self, flight: Flight, report: list[list[int]]) -> None:
        """Tell the choice of depth what came of this one. A round's time runs from the landing before it."""
        now = time.perf_counter()
        seconds, self._landed = now - max(self._landed, flight.begun), now
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

    def _say(self, row: Row, tokens: list[int], accepted: int, proposed: int, flight: Flight, index: int) -> None:
        """Hand a round's tokens to their request, up to where the answer ends."""
        tokens, matcher = tokens[: row.limit - row.said], row.matcher
        if matcher is not None:
            tokens = tokens[: matcher.advance(tokens)]
        texts, reason = self._read(row, tokens)
        tokens = tokens[: len(texts)]
        row.stats.count(len(tokens), accepted, proposed, time.perf_counter() - row.started)
        if reason is None and matcher is not None and matcher.stopped:
            reason = "stop"
        if reason is None and row.said >= row.limit:
            reason = "length"
        if reason is not None:
            row.over = True
            if row.text is not None:
                texts[-1] += row.text.finish()
                reason = "stop" if row.text.stopped else reason
        request, here = row.handle.request, (index, slice(len(tokens)))
        event = Event(
            tokens, origins(len(tokens), accepted, proposed), finish_reason=reason, stats=deepcopy(row.stats)
        )
        if row.text is not None:
            event = replace(event, texts=texts)
        if request.params.logprobs and flight.logprobs is not None:
            event = replace(event, logprobs=_token_logprobs(Logprobs(*[a[here] for a in flight.logprobs]), request))
        if request.keep_logits and flight.logits is not None:
            event = replace(event, logits=flight.logits[here])
        if tokens:
            row.handle.put(event)
        if reason is None and matcher is not None and matcher.failed is not None:
            self._finish(row, "error", matcher.failed)

    def _read(self, row: Row, tokens: list[int]) -> tuple[list[str], FinishReason | None]:
        """The text of each token up to the first that ends the answer."""
        texts: list[str] = []
        for token in tokens:
            ends = token in row.asked.params.stop_ids
            texts.append("" if ends or row.text is None else row.text.add(token))
            if ends or (row.text is not None and row.text.stopped):
                return texts, "stop"
        return texts, None

    def _finish(self, row: Row, reason: FinishReason, error: Exception | None = None) -> None:
        row.over, row.matcher = True, None
        if error is not None and not isinstance(error, HeadstartError):
            error = HeadstartError(f"{type(error).__name__}: {error}")
        row.handle.put(Event(finish_reason=reason, stats=deepcopy(row.stats), error=error))

    def _abandon(self, error: Exception) -> None:
        """End all running rows with an error, and be ready for others."""
        for row in self._rows:
            if not row.over:
                self._finish(row, "error", error)
        self._rows, self._batch, self._flight = [], None, None

    def _drop_finished(self) -> None:
        staying = [i for i, row in enumerate(self._rows) if not row.over]
        if self._batch is None or len(staying) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in staying]
        if not self._rows:
            self._batch = None
            return
        self._steady = False
        self._batch.keep(staying, self.model)
        if self._batch.head is not None and not any(row.drafter.ceiling for row in self._rows):
            self._batch.forget_head(self.model)


def _token_logprobs(told: Logprobs, request: Request) -> list[TokenLogprobs]:
    chosen: list[float] = told.chosen.tolist()  # type: ignore[assignment]
    ids: list[list[int]] = told.top_ids.tolist()  # type: ignore[assignment]
    top: list[list[float]] = told.top.tolist()  # type: ignore[assignment]
    best = [list(zip(i, t, strict=True))[: request.params.top_logprobs] for i, t in zip(ids, top, strict=True)]
    return [TokenLogprobs(c, b) for c, b in zip(chosen, best, strict=True)]
