"""Who waits for a place, and who is next: clients take turns, so that one with many requests keeps nobody out."""

from collections import OrderedDict, deque
from collections.abc import Collection
from threading import Lock

from ..errors import Busy
from .request import Handle
from .sequence import SequenceState


class Queue:
    """Filled from any thread, emptied by the engine's."""

    def __init__(self, most: int | None = None):
        self.most = most
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[SequenceState]] = OrderedDict()  # by client, next one first
        self._again: deque[SequenceState] = deque()  # had a place and lost it: before all others

    def __len__(self) -> int:
        with self._lock:
            return len(self._again) + sum(map(len, self._waiting.values()))

    def put(self, row: SequenceState, client: str) -> None:
        with self._lock:
            waiting = sum(map(len, self._waiting.values()))
            # The last eighth is for clients that have none waiting: nobody fills it all.
            kept = self.most // 8 if self.most is not None and client in self._waiting else 0
            if self.most is not None and waiting >= self.most - kept:
                raise Busy(f"{waiting} requests are waiting already: try again in a moment", retry_after=1)
            self._waiting.setdefault(client, deque()).append(row)

    def put_back(self, row: SequenceState) -> None:
        with self._lock:
            self._again.appendleft(row)

    def first(self) -> SequenceState | None:
        with self._lock:
            if self._again:
                return self._again[0]
            return next((rows[0] for rows in self._waiting.values()), None)

    def take(self) -> SequenceState:
        """The first one. Its client's turn comes again after all others'."""
        with self._lock:
            if self._again:
                return self._again.popleft()
            client, rows = next(iter(self._waiting.items()))
            row = rows.popleft()
            self._waiting.move_to_end(client)
            if not rows:
                del self._waiting[client]
            return row

    def all(self) -> list[SequenceState]:
        with self._lock:
            return self._everyone()

    def drop(self, handles: Collection[Handle]) -> list[SequenceState]:
        """The rows of these requests, which wait no longer."""
        with self._lock:
            gone = [row for row in self._everyone() if row.handle in handles]
            if gone:
                self._again = deque(row for row in self._again if row not in gone)
                left = {client: deque(r for r in rows if r not in gone) for client, rows in self._waiting.items()}
                self._waiting = OrderedDict((client, rows) for client, rows in left.items() if rows)
            return gone

    def clear(self) -> list[SequenceState]:
        with self._lock:
            everyone = self._everyone()
            self._again.clear()
            self._waiting.clear()
            return everyone

    def _everyone(self) -> list[SequenceState]:
        return [*self._again, *(row for rows in self._waiting.values() for row in rows)]
