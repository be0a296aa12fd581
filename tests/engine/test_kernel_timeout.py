"""A persistent kernel that gave up costs time, not tokens, and is not used again."""

import time
from copy import copy
from dataclasses import replace
from threading import Thread, current_thread

import mlx.core as mx
import pytest

from fixtures import collect, random_model, random_prompt, submit
from headstart.engine import Engine, EngineThread
from headstart.errors import HeadstartError
from headstart.kernels.cuda import persistent, report
from headstart.kernels.cuda.persistent import Persistent
from headstart.kernels.cuda.report import CudaReport
from headstart.kernels.report import join_columns


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_step_is_computed_again_and_no_sequence_ends(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, 7 + n, n) for n in range(sequences)]
    expected = [collect(submit(Engine(model), prompt, k=2, max_tokens=20)).tokens for prompt in prompts]
    ours, backend = Persistent(), copy(model.backend)
    monkeypatch.setattr(backend, "report", lambda columns: CudaReport(columns, ours), raising=False)
    monkeypatch.setattr(report, "launch_columns", lambda columns, for_host: [join_columns(columns)])
    model = replace(model, backend=backend)
    engine = Engine(model)
    handles = [submit(engine, prompt, k=2, max_tokens=20) for prompt in prompts]
    engine.prefill_all()
    for _ in range(3):
        engine.run_once()
    ours.status, ours.launched, ours._owner = mx.array([1, 0, 0, 0], mx.int32), True, current_thread()
    answers = [collect(handle) for handle in handles]
    assert [answer.tokens for answer in answers] == expected
    assert [answer.finish_reason for answer in answers] == ["length"] * sequences
    assert ours.refusal is not None
    assert engine.recovery.recomputed["failure"] == sequences
    assert engine.recovery.retries == 1


def test_the_thread_of_an_engine_launches_them_though_another_warmed_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "resident_blocks", lambda shared: 2)
    ours, model = Persistent(), random_model("dense")
    backend = copy(model.backend)
    monkeypatch.setattr(backend, "release", ours.release, raising=False)
    engine = Engine(replace(model, backend=backend))
    monkeypatch.setattr(engine, "run_once", lambda: asked.append(ours.claim()))
    asked: list[bool] = []
    assert ours.claim()  # as a warm-up does
    with EngineThread(engine) as thread:
        submit(engine, [1, 2, 3])
        thread.device.wake(engine)
        while not asked:
            time.sleep(0.01)
        engine.end_all(HeadstartError("enough"))
    assert asked[0]


def test_a_barrier_that_was_given_up_is_forgotten_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "resident_blocks", lambda shared: 2)
    ours = Persistent()
    assert ours.claim()
    ours.status = mx.array([1, 0, 0, 0], mx.int32)
    other = Thread(target=ours.give_up, args=["a test"])
    other.start()
    other.join()
    assert ours.status.tolist()[0] == 0
    assert not ours.claim()
