"""A persistent kernel that gave up costs time, not tokens, and is not used again."""

import time
from threading import Thread, current_thread

import mlx.core as mx
import pytest

from fixtures import collect, random_model, random_prompt, submit
from headstart.engine import Engine, EngineThread, pending_step
from headstart.errors import HeadstartError
from headstart.kernels.cuda import persistent
from headstart.kernels.cuda.persistent import PERSISTENT, Persistent


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_step_is_computed_again_and_no_sequence_ends(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, 7 + n, n) for n in range(sequences)]
    expected = [collect(submit(Engine(model), prompt, k=2, max_tokens=20)).tokens for prompt in prompts]
    ours = Persistent()
    monkeypatch.setattr(pending_step, "PERSISTENT", ours)
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
    assert engine.recomputed["failure"] == sequences
    assert engine.retries == 1


def test_the_thread_of_an_engine_launches_them_though_another_warmed_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "on_cuda", lambda: True)
    monkeypatch.setattr(persistent, "resident_blocks", lambda shared: 2)
    monkeypatch.setattr(PERSISTENT, "_owner", None)
    engine = Engine(random_model("dense"))
    monkeypatch.setattr(engine, "run_once", lambda: asked.append(PERSISTENT.claim()))
    asked: list[bool] = []
    assert PERSISTENT.claim()  # as a warm-up does
    with EngineThread(engine) as thread:
        submit(engine, [1, 2, 3])
        thread.device.wake(engine)
        while not asked:
            time.sleep(0.01)
        engine.end_all(HeadstartError("enough"))
    assert asked[0]


def test_a_barrier_that_was_given_up_is_forgotten_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "on_cuda", lambda: True)
    monkeypatch.setattr(persistent, "resident_blocks", lambda shared: 2)
    ours = Persistent()
    assert ours.claim()
    ours.status = mx.array([1, 0, 0, 0], mx.int32)
    other = Thread(target=ours.give_up, args=["a test"])
    other.start()
    other.join()
    assert ours.status.tolist()[0] == 0
    assert not ours.claim()
