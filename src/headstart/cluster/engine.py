"""The same engine on every machine: the first decides what only one can, and the others do as it did.

A turn is the same everywhere as long as it begins with the same rows: then every machine drafts, judges and commits
alike, and the messages between the devices pair up. What would differ is who comes and goes, which clients decide,
the depth, which a clock decides, and how much memory there is. The first two go over the link at their place in the
turn, and the memory is agreed on once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import Depth, Engine, Event, Handle, Request
from ..engine.depth import Controller, Drafter
from ..engine.flight import Flight
from ..engine.memory import Footprint
from ..engine.row import Row
from ..errors import ClusterError, Down
from ..models import Model
from ..state.prefix import Sizes
from .machines import Machines
from .pipeline import Pipeline
from .prefix import SharedPrefix
from .tensor import Tensor

FAREWELL = 0.5  # seconds for clients to be told that it is over
WIDE = 64  # positions of the larger message that is timed


@dataclass(frozen=True)
class Order:
    """A request that is let in, with all that was decided of it."""

    number: int
    request: Request
    key: int  # of its noise
    max_k: int


class Begin(NamedTuple):
    """How a turn begins."""

    cancelled: list[int]  # numbers of requests
    admitted: list[Order | None]  # None: the first of those who gave up their place


FORGET = "forget"  # instead of a turn: what is kept of prompts


class Member(Engine):
    """What all ranks have in common. Nothing is mended here: where one fails, the others are inside a collective."""

    def __init__(
        self,
        machines: Machines,
        model: Model,
        tokenizer: TokenizerWrapper | None,
        depth: Controller,
        prefix: SharedPrefix | None,
        **engine: Any,
    ):
        super().__init__(model, tokenizer, depth=depth, prefix=prefix, **engine)
        assert isinstance(model.share, (Tensor, Pipeline)), "load it with cluster.load"
        self.link, self.share, self.wire = machines.link, model.share, machines.wire
        self._agree(prefix)
        self.speed = self.wire.measure(mx.zeros((WIDE, int(model.config["hidden_size"])), model.dtype))
        self.handles: dict[int, Handle] = {}  # by number
        self._landings = 0

    def turn(self) -> bool:
        self.link.begin_turn()
        busy = super().turn()
        self.link.end_turn()
        waiting = {id(row.handle) for row in (*self.queue.all(), *self.entering, *self.rows)}
        self.handles = {number: handle for number, handle in self.handles.items() if id(handle) in waiting}
        return busy

    def take_in_again(self) -> None:
        self.link.fail(ClusterError("its engine died, and one of several cannot start again alone"))

    def _agree(self, prefix: SharedPrefix | None) -> None:
        """On what everybody has room for, and when rounds are told. Machines and their parts differ, and must let the
        same rows in and out."""
        kept = prefix.max_bytes if prefix is not None else 0
        mine = [self.footprint.fixed, self.footprint.position, self.memory, kept, self._ahead]
        everybody: Any = self.wire.gather(mx.array(mine, mx.int64)).tolist()
        fixed, position, memory, kept_by, ahead = zip(*everybody, strict=True)
        self.footprint, self.memory = Footprint(max(fixed), max(position)), min(memory)
        self._ahead = all(ahead)
        if prefix is not None:
            prefix.agree(min(kept_by), Sizes(prefix.chunk * max(position), max(fixed)))

    def _learn(self, flight: Flight, report: list[list[int]]) -> None:
        positions = len(flight.rows) * (flight.k + 1)
        hidden = int(self.model.config["hidden_size"]) * self.model.dtype.size
        seconds = self.share.operations * self.speed.seconds(positions * hidden)
        self.communication_seconds += seconds
        for row in flight.rows:
            if not row.over:
                row.stats.communication_seconds += seconds
        super()._learn(flight, report)
        self._landings += 1
        self.link.check(self._landings, crc32(repr(report).encode()))

    def _recover(self, error: Exception) -> None:
        self.link.fail(error)

    def _end_or_retry(self, row: Row, error: Exception) -> None:
        self.link.fail(error)


class Leader(Member):
    """Rank 0, which clients know as the engine."""

    def __init__(
        self,
        machines: Machines,
        model: Model,
        tokenizer: TokenizerWrapper | None = None,
        *,
        prefix: SharedPrefix | None = None,
        **engine: Any,
    ):
        """`engine`: other arguments of Engine's."""
        chosen = Chosen(Depth(model.max_k, model.default_k), machines)
        super().__init__(machines, model, tokenizer, chosen, prefix, **engine)
        self.link.on_end = self._take_leave
        if prefix is not None:
            prefix.on_clear = self._forget_prefix
        self._gone: list[Row] = []
        self._numbers = 0

    def _cancelled(self) -> list[Row]:
        self._gone = super()._cancelled()
        return self._gone

    def _admit(self) -> list[Row]:
        known = {id(handle): number for number, handle in self.handles.items()}
        cancelled = {known[id(row.handle)] for row in self._gone if id(row.handle) in known}
        rows = super()._admit()
        self.link.decide(Begin(sorted(cancelled), [self._order(row, known) for row in rows]))
        return rows

    def _order(self, row: Row, known: dict[int, int]) -> Order | None:
        if id(row.handle) in known:
            return None
        self._numbers += 1
        self.handles[self._numbers] = row.handle
        return Order(self._numbers, row.handle.request, row.asked.key, row.drafter.ceiling)

    def _forget_prefix(self) -> None:
        with self._turning:
            self.link.decide(FORGET)
            forget(self)

    def _take_leave(self, reason: str) -> None:
        """Nothing here may wait for the device, which waits for those who are gone."""
        for row in (*self.queue.clear(), *self.entering, *self.rows):
            if not row.over:
                row.finish("error", Down(f"the machines have stopped: {reason}"))
        time.sleep(FAREWELL)


class Follower(Member):
    """Any other rank. It tells nobody what its rows say: rank 0 says the same."""

    def __init__(
        self,
        machines: Machines,
        model: Model,
        tokenizer: TokenizerWrapper | None = None,
        *,
        prefix: SharedPrefix | None = None,
    ):
        super().__init__(machines, model, tokenizer, Told(machines), prefix)
        self._told = Begin([], [])

    def run(self, *, warm_up: bool = False) -> None:
        """Until the first rank says that it is over. Whether it warms up first, all must do alike."""
        if warm_up:
            self.warm_up()
        while (begin := self.link.decided()) is not None:
            if begin == FORGET:
                forget(self)
                continue
            self._told = begin
            self.turn()

    def _cancelled(self) -> list[Row]:
        for number in self._told.cancelled:
            self.handles[number].cancel()
        return super()._cancelled()

    def _admit(self) -> list[Row]:
        rows = [self._again() if order is None else self._row(order) for order in self._told.admitted]
        self.entering += rows
        return rows

    def _again(self) -> Row:
        while (row := self.queue.take()).over:
            pass
        return row

    def _row(self, order: Order) -> Row:
        handle = self.handles[order.number] = Handle(order.request, None, _nobody)
        return Row.of(handle, self.model, self.tokenizer, order.max_k, key=order.key)


class Chosen:
    """The depth as a controller chooses it, told to all."""

    def __init__(self, controller: Controller, machines: Machines):
        self._controller, self._link = controller, machines.link

    @property
    def gains(self) -> Sequence[float]:
        return self._controller.gains

    def choose(self, rows: Sequence[Drafter]) -> int:
        k = self._controller.choose(rows)
        self._link.decide(k)
        return k

    def observe(
        self, rows: Sequence[Drafter], k: int, outcomes: Sequence[tuple[int, int]], seconds: float | None
    ) -> None:
        self._controller.observe(rows, k, outcomes, seconds)


class Told:
    """The depth as the first rank says it."""

    gains: Sequence[float] = ()

    def __init__(self, machines: Machines):
        self._link = machines.link

    def choose(self, rows: Sequence[Drafter]) -> int:
        k = self._link.decided()
        if k is None:
            raise ClusterError("rank 0 has left in the middle of a turn")
        return int(k)

    def observe(
        self, rows: Sequence[Drafter], k: int, outcomes: Sequence[tuple[int, int]], seconds: float | None
    ) -> None:
        pass


def forget(engine: Member) -> None:
    if isinstance(engine.prefix, SharedPrefix):
        engine.prefix.clear_here()


def _nobody(event: Event) -> None:
    """Hears it."""
