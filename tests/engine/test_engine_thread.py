"""The engine's own thread: it serves many others, survives a death, and closes in order."""

import time
from collections.abc import Iterator
from threading import Thread, current_thread
from typing import Any

import pytest

from fixtures import Answer, collect, generate, random_model, random_prompt, remembering
from headstart.engine import Engine, EngineThread, Event, Handle, Request, engine
from headstart.engine.depth import DepthController
from headstart.engine.sequence import SequenceState
from headstart.engine.step_time import time_steps
from headstart.errors import Busy, EngineDown, HeadstartError, RequestError
from headstart.kernels.graph import Graph
from headstart.sampling import SamplingParams

model = random_model("dense")
PROMPTS = [random_prompt(model, 7 + 3 * i, i) for i in range(6)]


@pytest.fixture
def room() -> Iterator[EngineThread]:
    room = EngineThread(Engine(random_model("dense"), max_sequences=4))
    room.start()
    yield room
    room.close(0)


def request(i: int, max_tokens: int = 30) -> Request:
    how = {"temperature": 1.0, "seed": i} if i % 2 else {}
    return Request(PROMPTS[i], SamplingParams(max_tokens=max_tokens, **how))


def expected(i: int, max_tokens: int = 30) -> list[int]:
    how = {"temperature": 1.0, "seed": i} if i % 2 else {}
    return generate(model, PROMPTS[i], max_tokens=max_tokens, **how).tokens


def test_requests_from_many_threads_get_their_own_answers(room: EngineThread) -> None:
    answers: dict[int, Answer] = {}
    threads = [Thread(target=lambda i=i: answers.update({i: collect(room.submit(request(i)))})) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {i: answer.tokens for i, answer in answers.items()} == {i: expected(i) for i in range(6)}


def test_a_listener_that_fails_ends_its_own_request_only(room: EngineThread) -> None:
    def deaf(event: object) -> None:
        raise RuntimeError("the loop is closed")

    bad = room.submit(request(0, 1000), listener=deaf)
    assert collect(room.submit(request(1))).tokens == expected(1)
    wait(lambda: room.running == 0)
    assert bad.cancelled
    assert room.healthy


def test_an_answer_that_two_threads_end_at_once_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread has its last token in hand while another ends everything."""
    engine, events, honest = Engine(model), list[Event](), SequenceState.emit

    def emit(sequence: SequenceState, *generated: Any) -> None:
        other = Thread(target=engine.end_all, args=(EngineDown("over"),))
        other.start()
        other.join(60)
        honest(sequence, *generated)

    monkeypatch.setattr(SequenceState, "emit", emit)
    engine.submit(request(0, max_tokens=1), listener=events.append)
    while engine.run_once():
        pass
    assert [event.finish_reason for event in events] == ["error"]


def dying(engine: Engine, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The next turns that have sequences kill the thread that makes them."""
    honest, deaths = engine.run_once, iter(range(times))

    def run_once() -> bool:
        if engine.scheduler.running.sequences and next(deaths, None) is not None:
            raise SystemExit("killed")
        return honest()

    monkeypatch.setattr(engine, "run_once", run_once)


def wait(condition: object, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_thread_that_dies_is_started_once_more_and_nobody_loses_a_token(
    room: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(room.engine, monkeypatch, times=1)
    handles = [room.submit(request(i)) for i in range(6)]
    assert [collect(handle).tokens for handle in handles] == [expected(i) for i in range(6)]
    assert (room.healthy, room.device.restarts) == (True, 1)
    assert room.device.problem == "SystemExit: killed"


def test_a_thread_that_dies_again_ends_all_requests_and_reports_it(
    room: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(room.engine, monkeypatch, times=2)
    answers = [collect(handle) for handle in [room.submit(request(i)) for i in range(6)]]
    assert {answer.finish_reason for answer in answers} == {"error"}
    assert all("the engine died: SystemExit: killed" in str(answer.error) for answer in answers)
    wait(lambda: not room.healthy)
    with pytest.raises(HeadstartError, match="the engine is down"):
        room.submit(request(0))


def test_a_thread_that_cannot_be_started_again_ends_everything(
    room: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise RuntimeError("can't start new thread")

    dying(room.engine, monkeypatch, times=1)
    monkeypatch.setattr(room.device, "start", full)
    answers = [collect(handle) for handle in [room.submit(request(i)) for i in range(2)]]
    assert all("killed; then RuntimeError: can't start" in str(answer.error) for answer in answers)


def test_closing_finishes_what_runs_and_takes_nothing_new(room: EngineThread) -> None:
    handles = [room.submit(request(i)) for i in range(6)]
    closing = Thread(target=room.close, args=(60,))
    closing.start()
    wait(lambda: not room.healthy)
    with pytest.raises(Busy, match="shutting down"):
        room.submit(request(0))
    assert [collect(handle).tokens for handle in handles] == [expected(i) for i in range(6)]
    closing.join(60)
    assert not closing.is_alive()


def test_closing_cancels_what_is_left_at_the_deadline() -> None:
    room = EngineThread(Engine(random_model("dense", max_position_embeddings=100_000), max_sequences=2))
    room.start()
    handles: list[Handle] = [room.submit(request(i, 90_000)) for i in range(3)]
    wait(lambda: room.running == 2)
    room.close(0.1)
    assert [collect(handle).finish_reason for handle in handles] == ["cancelled"] * 3
    assert not room.engine.scheduler.busy


def test_settings_bound_the_depth_of_what_comes_after(room: EngineThread) -> None:
    room.configure(speculation=False)
    plain = collect(room.submit(request(0)))
    room.configure(speculation=True, max_k=1)
    shallow = collect(room.submit(Request(PROMPTS[0], SamplingParams(max_tokens=30, k=4))))
    assert plain.tokens == shallow.tokens == expected(0)
    assert plain.stats is not None
    assert plain.stats.bypass_reason == "speculation is switched off"
    assert shallow.stats is not None
    assert (set(shallow.stats.depths), shallow.stats.clamped_to) == ({1}, 1)
    for wrong in ({"max_k": 16}, {"max_k": True}, {"speculation": 1}):
        with pytest.raises(RequestError):
            room.configure(**wrong)


def test_a_request_that_comes_as_the_thread_ends_is_answered(
    room: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was let in, and then nobody was left to run the engine."""
    honest = room.engine.submit

    def slow(*args: object, **how: object) -> Handle:
        room.close(0)
        return honest(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(room.engine, "submit", slow)
    answer = collect(room.submit(request(0)))
    assert answer.finish_reason == "error"
    assert "the engine is down (it was closed)" in str(answer.error)


def test_an_engine_that_is_warm_has_timed_its_steps_and_answers_the_same() -> None:
    fresh = random_model("dense", seed=78)
    engine = Engine(fresh)
    assert isinstance(engine.depth, DepthController)
    assert not engine.depth.step_time.timings
    engine.warm_up()
    assert engine.depth.step_time.timings
    assert collect(engine.submit(request(0))).tokens == generate(fresh, PROMPTS[0], max_tokens=30, k=0).tokens


def test_what_the_warm_up_compiled_the_first_request_does_not_compile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx keeps what it compiled by thread: so a warm-up runs in the thread that decodes."""
    traced: list[str] = []
    trace = Graph._from_arrays

    def record(self: Graph, *arrays: Any) -> Any:
        traced.append(current_thread().name)
        return trace(self, *arrays)

    monkeypatch.setattr(Graph, "_from_arrays", record)
    # All depths are timed, however slow the machine is, and whatever the tests of the server have put in its place.
    monkeypatch.setattr(engine, "time_steps", lambda model, most, rows, budget: time_steps(model, most, rows, 1e9))
    with EngineThread(Engine(remembering(random_model.__wrapped__("dense")))) as room:
        room.warm_up()
        count = len(traced)
        assert set(traced) == {"device"}
        answer = collect(room.submit(Request([3, 5, 7], SamplingParams(max_tokens=10, k=1))))
    assert len(answer.tokens) == 10
    assert len(traced) == count
