"""Which requests run: they queue, and are admitted as places and memory allow. Nothing here touches the device."""

from collections import deque
from collections.abc import Callable

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import RequestError
from ..limits import MAX_K
from ..models import Model
from ..state import PrefixCache
from .memory import ANSWER, Footprint, memory_for_sequences
from .queue import Queue
from .request import Event, Handle, Request
from .sequence import SequenceState


class Scheduler:
    """The part of an engine that other threads call, and that decides what the next turn works on."""

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerWrapper | None,
        max_sequences: int,
        max_queue: int | None,
        memory_limit: int | None,
        prefix: PrefixCache | None,
    ):
        if max_sequences < 1:
            raise RequestError(f"max_sequences is {max_sequences}; it must be at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.max_sequences = max_sequences
        self.footprint = Footprint.of(model)
        set_aside, left = prefix.max_bytes if prefix is not None else 0, memory_for_sequences()
        if memory_limit is None and left - set_aside < self.footprint.bytes([1]) <= left:
            raise RequestError(
                f"a prefix cache of {set_aside / 1e9:.2f} GB leaves no room for requests: {left / 1e9:.2f} GB are "
                "left beside the model. Make it smaller"
            )
        self.memory = max(0, left - set_aside) if memory_limit is None else memory_limit
        self.prefix = prefix
        self.queue = Queue(max_queue)
        self.entering: deque[SequenceState] = deque()  # taking in their prompts
        self.rows: list[SequenceState] = []  # decoding, in the order of the batch
        self.threaded = False  # set by EngineThread: its thread runs the engine, and handles only wait
        self._cancel_all = False

    def turn(self) -> bool:
        """Do one turn of the work. Return False when nothing is left to do."""
        raise NotImplementedError

    def submit(
        self,
        request: Request,
        *,
        client: str = "",
        listener: Callable[[Event], None] | None = None,
        max_k: int = MAX_K,
    ) -> Handle:
        """Queue a request, from any thread. RequestError where it cannot be honoured, Busy where too many wait.

        Clients take turns. `listener` is told every event by the thread that turns the engine, instead of the
        handle. `max_k`: most drafts a round, besides what the model and the request allow.
        """
        request.check(self.model)
        if request.n > self.max_sequences:
            raise RequestError(f"n is {request.n}, and at most {self.max_sequences} answers can be given at a time")
        handle = Handle(request, None if self.threaded else self.turn, listener)
        row = SequenceState.of(handle, self.model, self.tokenizer, max_k)
        if (needed := self._bytes([row])) > self.memory:
            with_, or_n = ("its answer", "") if request.n == 1 else (f"{request.n} answers", " or n")
            raise RequestError(
                f"prompt has {len(request.prompt)} tokens and needs {needed / 1e9:.2f} GB with {with_}, and "
                f"{self.memory / 1e9:.2f} GB are left for requests: shorten it or lower max_tokens{or_n}"
            )
        self.queue.put(row, client)
        return handle

    def clear_prefix(self) -> None:
        """Forget the beginnings of prompts, from any thread."""
        if self.prefix is not None:
            self.prefix.clear()

    def cancel_all(self) -> None:
        """Stop everything at the next turn, and what comes after it, from any thread."""
        self._cancel_all = True

    def _bytes(self, rows: list[SequenceState]) -> int:
        """What these rows will need, as far as their answers are counted ahead."""
        each = [len(r.tokens) + min(r.limit - r.said, ANSWER) + MAX_K + 1 for r in rows for _ in (r, *r.siblings)]
        return self.footprint.bytes(each)

    def _end_cancelled(self) -> None:
        gone = self._cancelled()
        for row in (*self.queue.drop(gone), *self.entering, *self.rows):
            if row.handle in gone and not row.over:
                row.finish("cancelled")
        self.entering = deque(row for row in self.entering if not row.over)

    def _cancelled(self) -> set[Handle]:
        """Those that nobody waits for any more. Each is asked once, for its answers end together, and another thread
        may cancel it in between."""
        handles = {row.handle for row in (*self.queue.all(), *self.entering, *self.rows)}
        return {handle for handle in handles if self._cancel_all or handle.cancelled}

    def _admit(self) -> list[SequenceState]:
        """As many as there are places and memory for. The first in the queue waits for its share, not for luck."""
        admitted: list[SequenceState] = []
        while (row := self.queue.first()) is not None:
            if row.over:  # it gave up its place, and then the round in flight ended it
                self.queue.take()
                continue
            inside = [*self.rows, *self.entering]
            if sum(1 + len(each.siblings) for each in (*inside, row)) > self.max_sequences:
                break
            if inside and self._bytes([*inside, row]) > self.memory:
                break
            admitted.append(self.queue.take())
            self.entering.append(row)
        return admitted
