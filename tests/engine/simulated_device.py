"""A device whose clock advances by what its work is said to cost. Engine and model are real, their time is not."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from headstart.engine import Engine, Event, Handle, Request, engine, pending_step, prefill, prompt_reader, sequence
from headstart.engine.pending_step import PendingStep
from headstart.kernels.cpu.backend import StockCpu
from headstart.models.passes import finish
from headstart.sampling import SamplingParams
from headstart.state import CHUNK


@dataclass
class SimulatedDevice:
    """Seconds of a pass over a prompt, and of a step. `asynchronous`: the host goes on while the device works."""

    token: float
    step: float
    context: float = 0.0  # more per token and 1,000 tokens of context
    launch: float = 0.0  # of every pass, however narrow
    asynchronous: bool = False
    cut: int | None = 1
    widest: int = CHUNK  # tokens of a pass
    describe: float = 0.0  # seconds of the host for a layer of a pass, and for a step
    ahead: int | None = None  # layers that are launched at once

    now: float = field(default=0.0, init=False)
    ready: float = field(default=0.0, init=False)  # when all that was launched is done
    read: float = field(default=0.0, init=False)  # when the last pass is done
    passes: list[tuple[float, int, int]] = field(default_factory=list, init=False)  # launched when, begin, end
    steps: dict[int, float] = field(default_factory=dict, init=False)  # when it is done, by id
    layers: dict[int, float] = field(default_factory=dict, init=False)  # likewise, by the id of what it made

    def install(self, patch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(perf_counter=lambda: self.now, monotonic=time.monotonic)
        for module in (engine, pending_step, prefill, prompt_reader, sequence):
            patch.setattr(module, "time", clock)
        patch.setattr(StockCpu, "asynchronous", self.asynchronous)
        patch.setattr(StockCpu, "cut", self.cut)
        patch.setattr(StockCpu, "widest", self.widest)
        patch.setattr(StockCpu, "layers_ahead", self.ahead)
        honest, start, read = prefill.prefill_by_layers, PendingStep.start, PendingStep.read

        def simulated_prefill(model: Any, batch: Any, tokens: mx.array, *rest: Any) -> Any:
            begin, width = batch.trunk_state.bounds[0], tokens.shape[1]
            self.passes.append((self.now, begin, begin + width))
            steps = honest(model, batch, tokens, *rest)
            for _ in model.layers:
                self.now += self.describe
                self._work(self.pass_seconds(begin, width) / len(model.layers))
                self.read = self.ready
                made = next(steps)
                self.layers[id(made)] = self.ready
                yield made
            return finish(steps)

        def simulated_start(step: PendingStep) -> None:
            start(step)
            self.now += self.describe
            self._work(self.step)
            self.steps[id(step)] = self.ready

        def simulated_read(step: PendingStep) -> list[list[int]]:
            self.now = max(self.now, self.steps.pop(id(step)))
            return read(step)

        def wait(*arrays: Any) -> None:
            self.now = max(self.now, self.read)
            mx.eval(*arrays)

        patch.setattr(prefill, "prefill_by_layers", simulated_prefill)
        patch.setattr(PendingStep, "start", simulated_start)
        patch.setattr(PendingStep, "read", simulated_read)
        patch.setattr(prompt_reader, "mx", SimpleNamespace(eval=wait))

        def wait_for_layers(arrays: Sequence[mx.array]) -> None:
            self.now = max([self.now, *(self.layers.pop(id(array), 0.0) for array in arrays)])
            mx.eval(arrays)

        of_passes = SimpleNamespace(array=mx.array, int32=mx.int32, async_eval=mx.async_eval, eval=wait_for_layers)
        patch.setattr(prefill, "mx", of_passes)

    def pass_seconds(self, begin: int, width: int) -> float:
        return self.launch + width * (self.token + self.context * (begin + width / 2) / 1000)

    def prompt_seconds(self, length: int) -> float:
        """Seconds of a prompt that is read in whole chunks while nothing else runs."""
        return sum(self.pass_seconds(begin, min(512, length - begin)) for begin in range(0, length, 512))

    def _work(self, seconds: float) -> None:
        self.ready = max(self.ready, self.now) + seconds
        if not self.asynchronous:
            self.now = self.ready


class Stream:
    """A request, and when its events came."""

    def __init__(self, device: SimulatedDevice, of: Engine, prompt: Sequence[int], **params: Any):
        self.device, self.submitted = device, device.now
        self.times: list[float] = []  # of tokens
        self.tokens: list[int] = []
        self.ended: float | None = None
        request = Request(prompt, SamplingParams(**{"k": 0, **params}))
        self.handle: Handle = of.submit(request, listener=self._hear)

    def _hear(self, event: Event) -> None:
        assert event.error is None
        self.tokens += event.tokens
        self.times += [self.device.now] if event.tokens else []
        if event.finish_reason is not None:
            self.ended = self.device.now

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.submitted

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of those gaps that touch this time."""
        return [b - a for a, b in pairwise(self.times) if b > begin and a < end]
