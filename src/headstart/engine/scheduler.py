"""Queue requests and admit them as sequences, within the limits of batch size and memory."""

from bisect import insort
from collections import Counter, deque
from collections.abc import Set
from threading import Lock
from typing import NamedTuple

from ..errors import Busy, HeadstartError, RequestError
from ..limits import MAX_K
from ..models import Model
from ..models.memory import Footprint
from .memory import ANSWER, memory_for_sequences
from .request import Handle
from .running import Running
from .sequence import SequenceState

RESUMED = -1  # level of what was running before; the others have that of their priority, and lower ones go first


class QueueEntry(NamedTuple):
    level: int
    turn: int
    client: str
    sequence: SequenceState


class Queue:
    """Waiting requests, ordered so that clients take turns. Any thread may add; only the engine's removes.

    Those of a lower priority number go first. Of the same, the nth waiting request of a client gets the nth turn from
    now, and within a turn the first to arrive goes first.
    """

    def __init__(self, max_size: int | None = None):
        self.max_size = max_size
        self._lock = Lock()
        self._entries: list[QueueEntry] = []  # next one first
        self._turns: Counter[int] = Counter()  # by level: of the request taken last

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, sequence: SequenceState, client: str) -> None:
        with self._lock:
            waiting = [entry for entry in self._entries if entry.level != RESUMED]
            own = [entry for entry in waiting if entry.client == client]
            if self.max_size is not None:
                # The last eighth is for clients with nothing in the queue, so that no client can fill it.
                reserved = self.max_size // 8 if own else 0
                if len(waiting) >= self.max_size - reserved:
                    raise Busy(f"{len(waiting)} requests are waiting already: try again in a moment", retry_after=1)
            level = max(0, sequence.handle.request.priority)
            turn = max((entry.turn for entry in own if entry.level == level), default=self._turns[level]) + 1
            insort(self._entries, QueueEntry(level, turn, client, sequence), key=lambda entry: entry[:2])

    def put_back(self, sequence: SequenceState) -> None:
        """Requeue a sequence that had to stop, ahead of all others."""
        with self._lock:
            self._entries.insert(0, QueueEntry(RESUMED, 0, "", sequence))

    def all(self) -> list[SequenceState]:
        """Return the sequences, next one first."""
        with self._lock:
            return [entry.sequence for entry in self._entries]

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that is admitted."""
        with self._lock:
            entry = next(entry for entry in self._entries if entry.sequence is sequence)
            self._entries.remove(entry)
            self._turns[entry.level] = max(self._turns[entry.level], entry.turn)

    def remove_finished(self) -> None:
        with self._lock:
            self._entries = [entry for entry in self._entries if not entry.sequence.finished]


class Scheduler:
    """Decide which sequences run, within a number of them and within memory."""

    def __init__(
        self, model: Model, max_sequences: int, max_queue: int | None, memory_limit: int | None, reserved: int
    ):
        """`reserved`: bytes that the prefix cache may take of what the device has left."""
        if max_sequences < 1:
            raise RequestError(f"max_sequences is {max_sequences}; it must be at least 1")
        self.max_sequences = max_sequences
        self.footprint = Footprint.of(model)
        available = memory_for_sequences()
        if memory_limit is None and available - reserved < self.footprint.bytes([1]) <= available:
            raise RequestError(
                f"a prefix cache of {reserved / 1e9:.2f} GB leaves no room for requests: {available / 1e9:.2f} GB "
                "are left beside the model. Make it smaller"
            )
        self.memory = max(0, available - reserved) if memory_limit is None else memory_limit
        self.others = 0  # of that, what the sequences of other engines hold: see DeviceThread
        self.admits = True  # if False, another engine's request comes first
        self.queue = Queue(max_queue)
        self.prefilling: deque[SequenceState] = deque()
        self.running = Running(model)
        self.cancels_all = False  # also what is submitted from now on

    @property
    def left(self) -> int:
        """Return the memory for the sequences of this engine, which other engines leave."""
        return self.memory - self.others

    @property
    def admitted(self) -> list[SequenceState]:
        return [*self.prefilling, *self.running.sequences]

    @property
    def unfinished(self) -> list[SequenceState]:
        """Return the sequences of all requests: queued, prefilling and running."""
        return [each for each in (*self.queue.all(), *self.admitted) if not each.finished]

    @property
    def busy(self) -> bool:
        return bool(self.prefilling or self.running.sequences or self.running.pending or len(self.queue))

    @property
    def admitted_bytes(self) -> int:
        """Return the memory that the admitted sequences will need."""
        return self._bytes(self.admitted)

    @property
    def starved(self) -> bool:
        """Return whether the first request in the queue waits for memory that other engines hold."""
        waiting = [] if self.admitted else self.queue.all()[:1]
        return bool(waiting and self.others) and self._bytes(waiting) > self.left

    def put(self, sequence: SequenceState, client: str) -> None:
        """Queue a new sequence. Raise RequestError if it never fits, Busy if the queue is full."""
        request = sequence.handle.request
        if (needed := self._bytes([sequence])) > self.memory:
            answers, or_n = ("its answer", "") if request.n == 1 else (f"{request.n} answers", " or n")
            spare = self.footprint.longest(self.memory, request.n) - _ahead(sequence)
            remedy = f"shorten it to {spare} tokens" if 0 < spare < len(request.prompt) else "shorten it"
            raise RequestError(
                f"prompt has {len(request.prompt)} tokens and needs {needed / 1e9:.2f} GB with {answers}, and "
                f"{self.memory / 1e9:.2f} GB are left for requests: {remedy} or lower max_tokens{or_n}"
            )
        self.queue.put(sequence, client)

    def admit(self) -> list[SequenceState]:
        """Move sequences from the queue to `prefilling`, as many as fit. None overtakes the first in the queue."""
        admitted: list[SequenceState] = []
        for sequence in self.queue.all() if self.admits else ():
            inside = self.admitted
            if sum(1 + len(each.siblings) for each in (*inside, sequence)) > self.max_sequences:
                break
            if (inside or self.others) and self._bytes([*inside, sequence]) > self.left:
                break
            self.queue.remove(sequence)
            self.prefilling.append(sequence)
            admitted.append(sequence)
        return admitted

    def asked_to_cancel(self) -> set[Handle]:
        """Return the requests to cancel. Each flag is read once: all answers to a request must end together."""
        handles = {sequence.handle for sequence in self.unfinished}
        return {handle for handle in handles if self.cancels_all or handle.cancelled}

    def cancel(self, handles: Set[Handle]) -> None:
        for sequence in self.unfinished:
            if sequence.handle in handles:
                sequence.finish("cancelled")
        self.queue.remove_finished()  # also what the pending step ended after it was requeued
        self.drop_finished()

    def drop_finished(self) -> None:
        self.prefilling = deque(sequence for sequence in self.prefilling if not sequence.finished)
        self.running.drop_finished()

    def requeue_for_memory(self) -> list[SequenceState]:
        """Requeue the youngest running sequences while the next step of all would not fit. Return them."""
        requeued: list[SequenceState] = []
        while len(self.running.sequences) > 1 and self.footprint.bytes(self.running.lengths(MAX_K + 1)) > self.left:
            requeued.append(self.running.remove_youngest())
            self.queue.put_back(requeued[-1])
        return requeued

    def end_all(self, error: HeadstartError) -> None:
        for sequence in self.unfinished:
            sequence.finish("error", error)
        self.queue.remove_finished()
        self.prefilling.clear()
        self.running.clear()

    def _bytes(self, sequences: list[SequenceState]) -> int:
        """Return the memory that these sequences and their siblings will need, with answers up to ANSWER tokens."""
        lengths = []
        for sequence in sequences:
            lengths += [len(sequence.tokens) + _ahead(sequence)] * (1 + len(sequence.siblings))
        return self.footprint.bytes(lengths)


def _ahead(sequence: SequenceState) -> int:
    """Return the positions that are counted for what a sequence is still to generate."""
    return min(sequence.limit - sequence.num_generated, ANSWER) + MAX_K + 1
