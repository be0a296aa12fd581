"""The same engine on every machine: the first decides what only one can, and the others do as it did.

A turn is the same everywhere as long as it begins with the same rows: then every machine drafts, judges and commits
alike, and the messages between the devices pair up. What would differ is who comes and goes, which clients decide,
the depth, which a clock decides, and how much memory there is. The first two go over the link at their place in the
turn, and the memory is agreed on once.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import DepthController, Engine, Event, Handle, Request
from ..engine.depth import Controller, Drafter
from ..engine.memory import Footprint
from ..engine.pending_step import PendingStep
from ..engine.sequence import SequenceState
from ..errors import ClusterError, EngineDown
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
    rows: list[tuple[int, int]]  # of each that is inside by then: its tokens, and those that are taken in


FORGET = "forget"  # instead of a turn: what is kept of prompts


class Member(Engine):
    """What all ranks have in common. Nothing is mended here: where one fails, the others are inside a collective."""

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
        assert isinstance(model.share, (Tensor, Pipeline)), "load it with cluster.load"
        self.link, self.share, self.wire = machines.link, model.share, machines.wire
        depth = Told(machines) if machines.rank else Chosen(DepthController(model.max_k, model.default_k), machines)
        super().__init__(model, tokenizer, depth=depth, prefix=prefix, **engine)
        self._compare(prefix)  # and wait for whoever takes longest to read the model
        with self.link.turn():
            self._agree(prefix)
            self.speed = self.wire.measure(mx.zeros((WIDE, int(model.config["hidden_size"])), model.dtype))
        self.handles: dict[int, Handle] = {}  # by number
        self._landings = 0
        self.link.on_end = self._take_leave

    def turn(self) -> bool:
        with self.link.turn():
            try:
                busy = super().turn()
            except Exception as error:
                self.link.fail(error)
        waiting = {row.handle for row in (*self.queue.all(), *self.entering, *self.rows)}
        self.handles = {number: handle for number, handle in self.handles.items() if handle in waiting}
        return busy

    def warm_up(self) -> None:
        with self.link.turn():
            super().warm_up()

    def prefill_all(self) -> None:
        raise ClusterError("several machines take prompts in turn by turn: use one to take in all of them at once")

    def _compare(self, prefix: SharedPrefix | None) -> None:
        """What everybody has loaded: the same, or collectives would not pair up."""
        mine = {
            **{f"version of {name}": version(name) for name in ("headstart", "mlx", "mlx-lm")},
            "split": type(self.share).__name__,
            "config.json": json.dumps(self.model.config, sort_keys=True, default=str),
            "type of numbers": self.model.dtype,
            "multi-token-prediction head": (self.model.has_head, self.model.max_k),
            "prefix cache": prefix is not None and (prefix.eight_bits, prefix.chunk),
        }
        sums = mx.array([crc32(repr(each).encode()) for each in mine.values()], mx.int64)
        everybody: Any = self.wire.gather(sums).tolist()
        first = everybody[0]
        for rank, theirs in enumerate(everybody):
            if theirs != first:
                names = [name for name, a, b in zip(mine, first, theirs, strict=True) if a != b]
                raise ClusterError(
                    f"rank {rank} has another {' and another '.join(names)} than rank 0: give all machines the same "
                    "versions, model and options"
                )

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
            prefix.agree(self.wire, min(kept_by), Sizes(prefix.chunk * max(position), max(fixed)))

    def _inside(self) -> list[tuple[int, int]]:
        """How the rows stand. A turn that begins alike ends alike."""
        return [(len(row.tokens), row.taken) for row in (*self.entering, *self.rows)]

    def _learn(self, flight: PendingStep, report: list[list[int]]) -> None:
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

    def _waits(self) -> bool:
        """Where a step is not started before the last one is told, it must be told by everybody, and compared."""
        return super()._waits() or not self._ahead

    def _recover(self, error: Exception) -> None:
        raise error

    def _end_or_retry(self, row: SequenceState, error: Exception) -> None:
        raise error

    def _take_leave(self, reason: str) -> None:
        """Tell the clients. Nothing here may wait for the device, which waits for those who are gone."""
        for row in (*self.queue.clear(), *self.entering, *self.rows):
            if not row.over:
                row.finish("error", EngineDown(f"the machines have stopped: {reason}"))
        time.sleep(FAREWELL)


class Leader(Member):
    """Rank 0, which clients know as the engine."""

    _gone: set[Handle]  # cancelled, as this turn sees it
    _numbers = 0  # of requests that were let in

    def clear_prefix(self) -> None:
        with self._turning:
            self.link.decide(FORGET)
            super().clear_prefix()

    def _cancelled(self) -> set[Handle]:
        self._gone = super()._cancelled()
        return self._gone

    def _admit(self) -> list[SequenceState]:
        known = {handle: number for number, handle in self.handles.items()}
        cancelled = sorted(known[handle] for handle in self._gone if handle in known)
        rows = super()._admit()
        self.link.decide(Begin(cancelled, [self._order(row, known) for row in rows], self._inside()))
        return rows

    def _order(self, row: SequenceState, known: dict[Handle, int]) -> Order | None:
        if row.handle in known:
            return None
        self._numbers += 1
        self.handles[self._numbers] = row.handle
        return Order(self._numbers, row.handle.request, row.asked.key, row.drafter.ceiling)


class Follower(Member):
    """Any other rank. It tells nobody what its rows say: rank 0 says the same."""

    _told: Begin

    def run(self, *, warm_up: bool = False) -> None:
        """Until the first rank says that it is over. Whether it warms up first, all must do alike."""
        if warm_up:
            self.warm_up()
        while (begin := self.link.decided()) is not None:
            if begin == FORGET:
                self.clear_prefix()
                continue
            self._told = begin
            self.turn()

    def _cancelled(self) -> set[Handle]:
        return {self.handles[number] for number in self._told.cancelled}

    def _admit(self) -> list[SequenceState]:
        rows = [self._again() if order is None else self._row(order) for order in self._told.admitted]
        self.entering += rows
        if self._inside() != self._told.rows:
            self.link.end(self.link.rank, "holds other rows than rank 0: one of them ended alone, or began alone")
        return rows

    def _again(self) -> SequenceState:
        while (row := self.queue.take()).over:
            pass
        return row

    def _row(self, order: Order) -> SequenceState:
        handle = self.handles[order.number] = Handle(order.request, None, _nobody)
        return SequenceState.of(handle, self.model, self.tokenizer, order.max_k, key=order.key)


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


def _nobody(event: Event) -> None:
    """Hears it."""
