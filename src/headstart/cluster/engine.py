"""The same engine on every rank. Rank 0 leads: what it decides, the others repeat.

If all ranks begin an iteration with the same sequences, they draft, verify and commit alike, and the messages between
their devices match. Three things could differ: which requests come and go, which clients decide; the depth and the
slices of prompts, which depend on timings; and the memory. The leader sends the first two over the link at their
place in the iteration. The memory is agreed on once.
"""

import json
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import astuple
from importlib.metadata import version
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import DepthController, Engine, Handle, Request
from ..engine.decisions import Decisions
from ..engine.depth import Plan
from ..engine.request import ignore_event
from ..engine.scheduler import Scheduler
from ..engine.sequence import SequenceState
from ..errors import ClusterError, EngineDown
from ..models import Model
from ..models.memory import Footprint
from ..state import PrefixCache
from ..state.prefix import Sizes
from .communicator import Communicator
from .machines import Machines
from .parallel import ParallelTrunk

NOTICE = 0.5  # seconds to deliver errors to clients before the process ends
CLEAR_PREFIX = "clear prefix"  # broadcast between two iterations


class AdmittedRequest(NamedTuple):
    """A new request, with what only the leader can decide."""

    number: int
    request: Request
    key: int  # of its random numbers
    max_k: int


class IterationStart(NamedTuple):
    """What all ranks must do alike at the beginning of an iteration."""

    cancelled: list[int]  # numbers of requests
    admitted: list[AdmittedRequest | None]  # None: the first requeued sequence
    progress: list[tuple[int, int]]  # tokens, and prefilled tokens, of each admitted sequence: to compare


class SharedPrefix(PrefixCache):
    """The prefix cache of a cluster. Each rank stores its own part, and all store and evict the same prefixes.

    What is stored follows from the prompts, which are the same everywhere. Sizes are those of the largest part.
    The leader clears it on all ranks.
    """

    _comm: Communicator

    def agree(self, comm: Communicator, max_bytes: int, sizes: Sizes) -> None:
        self._comm, self.max_bytes, self.sizes = comm, max_bytes, sizes

    def store(self, *args: Any) -> None:
        try:
            super().store(*args)
        except Exception as error:  # the other ranks have stored it
            raise ClusterError("this machine cannot store a prefix that the others have stored") from error

    def _are_finite(self, arrays: list[mx.array]) -> bool:
        """Return whether they are on every rank: what breaks down in one rank's layers may spare another's."""
        return self._comm.everywhere(super()._are_finite(arrays))


class Rank(Decisions):
    """What all ranks have in common. No failure is recovered from: the other ranks would wait in a collective."""

    alone = False
    engine: Engine

    def __init__(self, machines: Machines):
        self.link, self.comm = machines.link, machines.comm
        self.handles: dict[int, Handle] = {}  # by the request's number
        self._steps = 0

    def begin(self, engine: Engine) -> None:
        assert isinstance(engine.model.share, ParallelTrunk), "load it with cluster.load_part"
        self.engine = engine
        self._check_same_setup()  # also waits for the rank that takes longest to load the model
        with self.link.iteration():
            self._agree()
        self.link.on_abort = self._end_requests

    @contextmanager
    def iteration(self) -> Iterator[None]:
        waiting = {sequence.handle for sequence in self.engine.scheduler.unfinished}
        self.handles = {number: handle for number, handle in self.handles.items() if handle in waiting}
        with self.link.iteration():
            try:
                yield
            except Exception as error:
                self.link.fail(error)

    def observe(self, report: list[list[int]]) -> None:
        self._steps += 1
        self.link.check(self._steps, crc32(repr(report).encode()))

    def _check_same_setup(self) -> None:
        model, prefix = self.engine.model, self.engine.prefix
        setup = {
            **{f"version of {name}": version(name) for name in ("headstart", "mlx", "mlx-lm")},
            "split": type(model.share).__name__,
            "config.json": json.dumps(model.config, sort_keys=True, default=str),
            "dtype": model.dtype,
            "chat template": self.engine.turn_marker,
            "KV cache": model.eight_bit_kv,
            "multi-token-prediction head": (model.has_head, model.max_k),
            "prefix cache": prefix is not None and (prefix.eight_bits, prefix.chunk),
        }
        sums = mx.array([crc32(repr(each).encode()) for each in setup.values()], mx.int64)
        first, *others = self._gather(sums)
        for rank, theirs in enumerate(others, 1):
            different = [name for name, a, b in zip(setup, first, theirs, strict=True) if a != b]
            if different:
                raise ClusterError(
                    f"rank {rank} has another {' and another '.join(different)} than rank 0: use the same versions, "
                    "model and options on all machines"
                )

    def _agree(self) -> None:
        """Use the largest footprint and the least memory of all ranks: all must admit and evict the same.

        Also launch steps ahead only if all ranks do.
        """
        engine, prefix = self.engine, self.engine.prefix
        scheduler = engine.scheduler
        max_bytes = prefix.max_bytes if prefix is not None else 0
        mine = [*astuple(scheduler.footprint), scheduler.memory, max_bytes, engine.runs_ahead]
        *footprints, memory, cache, ahead = zip(*self._gather(mx.array(mine, mx.int64)), strict=True)
        scheduler.footprint = Footprint(*map(max, footprints))
        scheduler.memory = min(memory)
        engine.runs_ahead = all(ahead)
        if prefix is not None:
            assert isinstance(prefix, SharedPrefix)
            prefix.agree(self.comm, min(cache), Sizes(scheduler.footprint.position, scheduler.footprint.fixed))

    def _gather(self, numbers: mx.array) -> list[list[int]]:
        return self.comm.gather(numbers).tolist()  # type: ignore[return-value]

    def _progress(self) -> list[tuple[int, int]]:
        return [(len(sequence.tokens), sequence.num_prefilled) for sequence in self.engine.scheduler.admitted]

    def _end_requests(self, reason: str) -> None:
        """End all requests before the process exits. Must not wait for the device, which waits for lost ranks."""
        for sequence in self.engine.scheduler.unfinished:
            sequence.finish("error", EngineDown(f"the cluster has stopped: {reason}"))
        time.sleep(NOTICE)


class Leader(Rank):
    """Rank 0, whose engine clients use: tell the others what it decides."""

    _cancelled: list[int]
    _requests = 0  # admitted so far

    def clear_prefix(self) -> None:
        self.link.broadcast(CLEAR_PREFIX)

    def cancelled(self, handles: Set[Handle]) -> Set[Handle]:
        self._cancelled = sorted(number for number, handle in self.handles.items() if handle in handles)
        return handles

    def admit(self, scheduler: Scheduler) -> None:
        numbers = {handle: number for number, handle in self.handles.items()}
        admitted: list[AdmittedRequest | None] = []
        for sequence in scheduler.admit():
            if sequence.handle in numbers:
                admitted.append(None)
                continue
            self._requests += 1
            self.handles[self._requests] = sequence.handle
            request, params = sequence.handle.request, sequence.params
            admitted.append(AdmittedRequest(self._requests, request, params.key, sequence.limits.most))
        self.link.broadcast(IterationStart(self._cancelled, admitted, self._progress()))

    def plan(self, choose: Callable[[], Plan]) -> Plan:
        plan = choose()
        self.link.broadcast(plan)
        return plan

    def slice(self, choose: Callable[[], int]) -> int:
        width = choose()
        self.link.broadcast(width)
        return width


class Follower(Rank):
    """Any other rank: repeat what the leader decides. Its events go nowhere, since rank 0 generates the same."""

    _start: IterationStart

    def run(self, *, warm_up: bool = False) -> None:
        """Run the engine until the leader closes. All ranks must warm up, or none."""
        if warm_up:
            self.engine.warm_up()
        while (message := self.link.receive()) is not None:
            if message == CLEAR_PREFIX:
                self.engine.clear_prefix()
                continue
            self._start = message
            self.engine.run_once()

    def cancelled(self, handles: Set[Handle]) -> Set[Handle]:
        return {self.handles[number] for number in self._start.cancelled}

    def admit(self, scheduler: Scheduler) -> None:
        scheduler.prefilling += [self._sequence(admitted, scheduler) for admitted in self._start.admitted]
        if self._progress() != self._start.progress:
            self.link.abort(self.link.rank, "has other sequences than rank 0: one of them ended or started alone")

    def plan(self, choose: Callable[[], Plan]) -> Plan:
        return Plan(*self._receive())

    def slice(self, choose: Callable[[], int]) -> int:
        return int(self._receive())

    def _receive(self) -> Any:
        """Return what the leader has decided in the middle of an iteration."""
        if (message := self.link.receive()) is None:
            raise ClusterError("rank 0 has left in the middle of a step")
        return message

    def _sequence(self, admitted: AdmittedRequest | None, scheduler: Scheduler) -> SequenceState:
        if admitted is None:
            sequence = scheduler.queue.all()[0]
            scheduler.queue.remove(sequence)
            return sequence
        handle = self.handles[admitted.number] = Handle(admitted.request, None, ignore_event)
        return SequenceState.of(handle, self.engine.model, self.engine.tokenizer, admitted.max_k, key=admitted.key)


def lead(machines: Machines, model: Model, tokenizer: TokenizerWrapper | None = None, **engine: Any) -> Engine:
    """Return rank 0's engine. Takes the arguments of `Engine`; a prefix cache is a `SharedPrefix`."""
    return _engine(Leader(machines), model, tokenizer, **engine)


def follow(machines: Machines, model: Model, tokenizer: TokenizerWrapper | None = None, **engine: Any) -> Follower:
    """Return what another rank runs, with the same arguments."""
    follower = Follower(machines)
    _engine(follower, model, tokenizer, **engine)
    return follower


def _engine(rank: Rank, model: Model, tokenizer: TokenizerWrapper | None, **engine: Any) -> Engine:
    return Engine(model, tokenizer, depth=DepthController.of(model), decisions=rank, **engine)
