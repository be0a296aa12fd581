"""The same engine on every rank. Rank 0 leads: what it decides, the others repeat.

If all ranks begin an iteration with the same sequences, they draft, verify and commit alike, and the messages between
their devices match. Three things could differ: which requests come and go, which clients decide; the depth, which
depends on timings; and the memory. The leader sends the first two over the link at their place in the iteration. The
memory is agreed on once.
"""

import json
import time
from dataclasses import astuple
from importlib.metadata import version
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..engine import DepthController, Engine, Handle, Request
from ..engine.depth import Plan
from ..engine.pending_step import PendingStep
from ..engine.request import ignore_event
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
    `Leader.clear_prefix` clears it on all ranks.
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


class ClusterEngine(Engine):
    """What all ranks have in common. No failure is recovered from: the other ranks would wait in a collective."""

    def __init__(
        self,
        machines: Machines,
        model: Model,
        tokenizer: TokenizerWrapper | None = None,
        *,
        prefix: SharedPrefix | None = None,
        **engine: Any,
    ):
        """Take the machines, and the arguments of `Engine`."""
        assert isinstance(model.share, ParallelTrunk), "load it with cluster.load_part"
        self.link, self.comm = machines.link, machines.comm
        depth = DepthController.of(model)
        super().__init__(model, tokenizer, depth=depth, prefix=prefix, **engine)
        self._check_same_setup(prefix)  # also waits for the rank that takes longest to load the model
        with self.link.iteration():
            self._agree_on_memory(prefix)
        self.handles: dict[int, Handle] = {}  # by the request's number
        self._steps = 0
        self.link.on_abort = self._end_requests

    def run_once(self) -> bool:
        with self.link.iteration():
            try:
                busy = super().run_once()
            except Exception as error:
                self.link.fail(error)
        waiting = {sequence.handle for sequence in self._unfinished()}
        self.handles = {number: handle for number, handle in self.handles.items() if handle in waiting}
        return busy

    def warm_up(self) -> None:
        with self.link.iteration():
            super().warm_up()

    def prefill_all(self) -> None:
        raise ClusterError("prefill_all is not available on several machines: use one")

    def _check_same_setup(self, prefix: SharedPrefix | None) -> None:
        setup = {
            **{f"version of {name}": version(name) for name in ("headstart", "mlx", "mlx-lm")},
            "split": type(self.model.share).__name__,
            "config.json": json.dumps(self.model.config, sort_keys=True, default=str),
            "dtype": self.model.dtype,
            "chat template": self.turn_marker,
            "KV cache": self.model.eight_bit_kv,
            "multi-token-prediction head": (self.model.has_head, self.model.max_k),
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

    def _agree_on_memory(self, prefix: SharedPrefix | None) -> None:
        """Use the largest footprint and the least memory of all ranks: all must admit and evict the same.

        Also launch steps ahead only if all ranks do.
        """
        max_bytes = prefix.max_bytes if prefix is not None else 0
        mine = [*astuple(self.footprint), self.memory, max_bytes, self._ahead]
        *footprints, memory, cache, ahead = zip(*self._gather(mx.array(mine, mx.int64)), strict=True)
        self.footprint = Footprint(*map(max, footprints))
        self.memory = min(memory)
        self._ahead = all(ahead)
        if prefix is not None:
            prefix.agree(self.comm, min(cache), Sizes(self.footprint.position, self.footprint.fixed))

    def _gather(self, numbers: mx.array) -> list[list[int]]:
        return self.comm.gather(numbers).tolist()  # type: ignore[return-value]

    def _progress(self) -> list[tuple[int, int]]:
        return [(len(sequence.tokens), sequence.num_prefilled) for sequence in self._admitted()]

    def _observe(self, pending: PendingStep, report: list[list[int]]) -> None:
        super()._observe(pending, report)
        self._steps += 1
        self.link.check(self._steps, crc32(repr(report).encode()))

    def _is_synchronous(self) -> bool:
        """Also where steps are not launched ahead: then all ranks compare a step before any starts the next."""
        return super()._is_synchronous() or not self._ahead

    def _recover(self, error: Exception) -> None:
        raise error

    def _prefill_failed(self, sequence: SequenceState, error: Exception) -> None:
        raise error

    def _end_requests(self, reason: str) -> None:
        """End all requests before the process exits. Must not wait for the device, which waits for lost ranks."""
        for sequence in self._unfinished():
            sequence.finish("error", EngineDown(f"the cluster has stopped: {reason}"))
        time.sleep(NOTICE)


class Leader(ClusterEngine):
    """Rank 0: the engine that clients use."""

    _cancelled_now: set[Handle]
    _requests = 0  # admitted so far

    def clear_prefix(self) -> None:
        with self._lock:
            self.link.broadcast(CLEAR_PREFIX)
            super().clear_prefix()

    def _cancelled(self) -> set[Handle]:
        self._cancelled_now = super()._cancelled()
        return self._cancelled_now

    def _admit(self) -> list[SequenceState]:
        numbers = {handle: number for number, handle in self.handles.items()}
        cancelled = sorted(numbers[handle] for handle in self._cancelled_now if handle in numbers)
        sequences = super()._admit()
        admitted: list[AdmittedRequest | None] = []
        for sequence in sequences:
            if sequence.handle in numbers:
                admitted.append(None)
                continue
            self._requests += 1
            self.handles[self._requests] = sequence.handle
            request, params = sequence.handle.request, sequence.params
            admitted.append(AdmittedRequest(self._requests, request, params.key, sequence.max_k))
        self.link.broadcast(IterationStart(cancelled, admitted, self._progress()))
        return sequences

    def _choose(self) -> Plan:
        plan = super()._choose()
        self.link.broadcast(plan)
        return plan


class Follower(ClusterEngine):
    """Any other rank. Its events go nowhere: rank 0 generates the same."""

    _start: IterationStart

    def run(self, *, warm_up: bool = False) -> None:
        """Repeat what the leader does until it closes. All ranks must warm up, or none."""
        if warm_up:
            self.warm_up()
        while (message := self.link.receive()) is not None:
            if message == CLEAR_PREFIX:
                self.clear_prefix()
                continue
            self._start = message
            self.run_once()

    def _cancelled(self) -> set[Handle]:
        return {self.handles[number] for number in self._start.cancelled}

    def _admit(self) -> list[SequenceState]:
        sequences = [self._sequence(admitted) for admitted in self._start.admitted]
        self.prefilling += sequences
        if self._progress() != self._start.progress:
            self.link.abort(self.link.rank, "has other sequences than rank 0: one of them ended or started alone")
        return sequences

    def _sequence(self, admitted: AdmittedRequest | None) -> SequenceState:
        if admitted is None:
            sequence = self.queue.all()[0]
            self.queue.remove(sequence)
            return sequence
        handle = self.handles[admitted.number] = Handle(admitted.request, None, ignore_event)
        return SequenceState.of(handle, self.model, self.tokenizer, admitted.max_k, key=admitted.key)

    def _choose(self) -> Plan:
        plan = self.link.receive()
        if plan is None:
            raise ClusterError("rank 0 has left in the middle of a step")
        return Plan(*plan)
