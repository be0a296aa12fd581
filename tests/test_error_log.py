"""Failures leave a trace in the log and in the counters, without the words of what was asked."""

from itertools import count
from types import SimpleNamespace

import mlx.core as mx
import pytest

import headstart.engine.pending_step
import headstart.engine.prefill
import headstart.error_log as log
from fixtures import collect, random_model, random_prompt, submit
from headstart.engine import Engine, EngineThread, Request
from headstart.sampling import SamplingParams

model = random_model("dense")
SECRET = "the words of a prompt"


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_seen", {})


def failing(monkeypatch: pytest.MonkeyPatch, module: object, name: str, error: Exception) -> None:
    """The next call fails."""
    work, calls = getattr(module, name), count()

    def fail(*arguments: object, **more: object) -> object:
        if not next(calls):
            raise error
        return work(*arguments, **more)

    monkeypatch.setattr(module, name, fail)


def start(engine: Engine, rows: int) -> list[object]:
    handles = [submit(engine, random_prompt(model, 9 + i, i), max_tokens=12, k=2) for i in range(rows)]
    engine.prefill_all()
    return handles  # type: ignore[return-value]


def logged(caplog: pytest.LogCaptureFixture, message: str) -> str:
    """The one record of a failure: with a traceback, and without its words."""
    (record,) = [each for each in caplog.records if message in each.getMessage()]
    assert record.name == "headstart.engine"
    assert "test_error_log.py" in record.getMessage()
    assert SECRET not in record.getMessage()
    return record.getMessage()


def test_a_step_that_is_retried_is_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(model)
    handles = start(engine, 3)
    failing(monkeypatch, headstart.engine.pending_step, "step", ValueError(SECRET))
    assert [collect(handle).finish_reason for handle in handles] == ["length"] * 3  # type: ignore[arg-type]
    assert "ValueError" in logged(caplog, "a step failed; 3 sequences will be recomputed")
    assert engine.recovery.retries == 1
    assert engine.recovery.recomputed == {"failure": 6}  # each alone, and then together


def test_a_prefill_that_fails_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(model)
    failing(monkeypatch, headstart.engine.prefill, "prefill_by_layers", ValueError(SECRET))
    assert collect(submit(engine, random_prompt(model, 9), max_tokens=4, k=2)).finish_reason == "error"
    assert "ValueError" in logged(caplog, "prefill failed")
    assert (engine.recovery.retries, engine.recovery.recomputed) == (0, {})


def test_the_words_of_the_device_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(model)
    handles = start(engine, 2)
    failing(monkeypatch, headstart.engine.pending_step, "step", RuntimeError("[malloc] Unable to allocate 1 bytes."))
    assert [collect(handle).finish_reason for handle in handles] == ["length", "error"]  # type: ignore[arg-type]
    assert "RuntimeError: [malloc] Unable to allocate 1 bytes." in logged(caplog, "a step failed; 1 sequences")
    assert engine.recovery.recomputed == {"memory": 1}


@pytest.mark.parametrize(
    "message",
    [
        "cudaMallocManaged(&data, size) failed: out of memory",
        "cuLaunchKernel failed: an illegal instruction was encountered",
        "[METAL] Command buffer execution failed",
    ],
)
def test_messages_of_mlx_are_logged_and_others_are_not(message: str) -> None:
    assert message in log.format_error(RuntimeError(message))
    assert message not in log.format_error(RuntimeError(f"a client said {message}"))


def test_a_sequence_that_fails_alone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(model)
    (handle,) = start(engine, 1)
    assert engine.scheduler.running.batch is not None
    engine.scheduler.running.batch.trunk_state.layers[0].state[0] = mx.array(mx.nan)  # type: ignore[union-attr]
    assert collect(handle).finish_reason == "error"  # type: ignore[arg-type]
    assert "a sequence failed; its request ends with an error" in caplog.text


def test_a_thread_that_dies_is_logged_and_its_sequences_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = EngineThread(Engine(model))
    honest, died = room.engine.run_once, []

    def run_once() -> bool:
        if room.engine.scheduler.running.sequences and not died:
            died.append(True)
            raise SystemExit(SECRET)
        return honest()

    monkeypatch.setattr(room.engine, "run_once", run_once)
    room.start()
    assert collect(room.submit(Request(random_prompt(model, 9), SamplingParams(max_tokens=9)))).error is None
    room.close(10)
    assert "SystemExit" in logged(caplog, "the engine's thread died")
    assert "was restarted" in caplog.text
    assert (room.device.restarts, room.engine.recovery.recomputed) == (1, {"restart": 1})


def test_a_listener_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    events = []

    def deaf(event: object) -> None:
        events.append(event)
        raise KeyError(SECRET)

    engine = Engine(model)
    handle = engine.submit(Request(random_prompt(model, 9), SamplingParams(max_tokens=90)), listener=deaf)
    while engine.run_once():
        pass
    assert "KeyError" in logged(caplog, "a listener failed; its request is cancelled")
    assert handle.cancelled
    assert len(events) == 1


def test_a_failure_that_repeats_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def fail(times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            try:
                raise ValueError(SECRET)
            except ValueError as error:
                log.log_error(log.LOG, "it failed", error=error)
        return [record.getMessage().splitlines()[0] for record in caplog.records]

    last = f"it failed (more like it in the next {log.WINDOW:g} s will not be logged)"
    assert fail(1000) == ["it failed"] * (log.MOST - 1) + [last]
    now[0] = log.WINDOW
    assert fail(2) == [f"it failed ({1000 - log.MOST} more like it were not logged)", "it failed"]


def test_causes_and_groups_are_logged_by_type_and_place() -> None:
    def nested() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise ExceptionGroup(SECRET, [ValueError(SECRET), TypeError(SECRET)]) from error

    with pytest.raises(ExceptionGroup) as caught:
        nested()
    told = log.format_error(caught.value)
    for kind in ("KeyError", "which led to", "ExceptionGroup", "ValueError", "TypeError", "in nested"):
        assert kind in told
    assert SECRET not in told
