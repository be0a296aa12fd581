"""Places that clients take in turn, so that one with much work keeps nobody out."""

import asyncio
from collections import Counter, OrderedDict, deque


class Turns:
    """A semaphore of `places`, of which one client holds at most `each`. Used from one event loop."""

    def __init__(self, places: int, each: int):
        self._places, self._each = places, each
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # whose turn is next comes first

    async def take(self, client: str) -> None:
        """Wait for a place. It must be given back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come just before
                self.give_back(client)
            raise

    def give_back(self, client: str) -> None:
        self._taken[client] -= 1
        self._taken += Counter()  # drops clients that hold none
        self._next()

    def _next(self) -> None:
        while self._taken.total() < self._places:
            client = next((each for each in self._waiting if self._taken[each] < self._each), None)
            if client is None:
                return
            turn = self._waiting[client].popleft()
            if self._waiting[client]:
                self._waiting.move_to_end(client)
            else:
                del self._waiting[client]
            if not turn.done():  # who waited has not gone
                self._taken[client] += 1
                turn.set_result(None)
