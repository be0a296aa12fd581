"""Graphs are remembered with the status of persistent kernels as an input and an output."""

import sys
from threading import Event, Thread
from typing import Any

import mlx.core as mx
import pytest

from fixtures import collect, random_model, random_prompt, remembering, submit
from headstart.engine import Engine
from headstart.kernels import graph
from headstart.kernels.cuda import persistent
from headstart.kernels.cuda.steps import CudaSteps
from headstart.kernels.graph import Graph
from headstart.state import BatchState
from headstart.thread_exit import wait_at_exit


def trace(backend: CudaSteps, run: Any) -> None:
    """Remember a graph: it is run twice with the same shape."""
    rows, remembered = random_model("dense").make_state(1), Graph(run, backend)
    for _ in range(graph.OFTEN + 1):
        remembered(rows, 1, mx.array([1]))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaSteps:
    monkeypatch.setattr(persistent, "resident_blocks", lambda shared: 2)
    return CudaSteps()


def test_what_one_thread_traces_another_does_not_see(backend: CudaSteps) -> None:
    tracing, seen = Event(), Event()
    calls: list[int] = []

    def run(rows: BatchState, x: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) > graph.OFTEN:  # this one is traced
            backend.persistent.status = backend.persistent.status + 0  # as a launch does
            tracing.set()
            seen.wait(60)
        return x

    thread = Thread(target=trace, args=[backend, run])
    thread.start()
    assert tracing.wait(60)
    try:
        assert backend.persistent.status.tolist()[0] == 0
    finally:
        seen.set()
        thread.join()


def test_a_trace_that_fails_leaves_a_status_that_can_be_computed(backend: CudaSteps) -> None:
    calls: list[int] = []

    def run(rows: BatchState, x: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) > graph.OFTEN:
            raise MemoryError("while it is traced")
        return x

    with pytest.raises(MemoryError):
        trace(backend, run)
    assert backend.persistent.status.tolist()[0] == 0


def test_engines_of_a_process_decode_at_once() -> None:
    """Each in a thread of its own, with graphs, as on CUDA."""

    def decode() -> list[list[int]]:
        model = remembering(random_model.__wrapped__("dense"))  # one of its own
        engine = Engine(model)
        handles = [submit(engine, random_prompt(model, 7, n), k=2, max_tokens=40) for n in range(3)]
        return [collect(handle).tokens for handle in handles]

    expected = decode()
    assert [len(tokens) for tokens in expected] == [40] * 3
    found: dict[int, list[list[int]]] = {}

    def run(number: int) -> None:
        wait_at_exit()
        found[number] = decode()

    threads = [Thread(target=run, args=[number]) for number in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # often, also while one of them traces
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert list(found.values()) == [expected] * 3
