"""Failures put in on purpose: whose requests they end, whose they do not, and what /health reports meanwhile."""

import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from running import Running, alone, chat_tokens, running, wait_until

import headstart.engine.pending_step
import headstart.engine.prefill
import headstart.engine.step
from headstart.engine import Engine, Request
from headstart.engine.batch import Batch
from headstart.server import openai_request
from headstart.server.response import ChoiceOutput
from headstart.server.server import Server
from headstart.server.states import READY
from metal_errors import IGNORED

TOPICS = ("sorting", "primes", "files", "dates")
LENGTH = 24
BAD = 17  # its min_tokens mark the request that is to fail


def ask(server: Running, topic: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": topic}]
    create: Any = server.openai().chat.completions.create
    return create(model="tiny", messages=messages, max_tokens=LENGTH, **fields).choices[0].message.content


def outcome(server: Running, topic: str, min_tokens: int) -> str | openai.APIStatusError:
    try:
        return ask(server, topic, extra_body={"min_tokens": min_tokens})
    except openai.APIStatusError as error:
        return error


def expected(topic: str, min_tokens: int = LENGTH) -> str:
    return alone(chat_tokens(topic), max_tokens=LENGTH, min_tokens=min_tokens).text


def all_at_once(server: Running, bad: str | None = None) -> dict[str, str | openai.APIStatusError]:
    with ThreadPoolExecutor(len(TOPICS)) as pool:
        asked = {topic: pool.submit(outcome, server, topic, BAD if topic == bad else LENGTH) for topic in TOPICS}
        return {topic: answer.result() for topic, answer in asked.items()}


def healthy(server: Running) -> bool:
    with server.http() as http:
        response = http.get("/health")
    assert (response.status_code == 200) == (response.json()["status"] in READY)
    return response.status_code == 200


def refuses(server: Running) -> bool:
    try:
        return not server.http().get("/health")
    except httpx.ConnectError:
        return True
    except httpx.ReadError:  # accepted, and then ended
        return False


def is_marked(batch: Batch) -> bool:
    return any(asked.params.min_tokens == BAD for asked in batch.params)


def fail_where_marked(work: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    def failing(model: Any, batch: Batch, *rest: Any, **sources: Any) -> Any:
        if is_marked(batch):
            raise error
        return work(model, batch, *rest, **sources)

    return failing


class Once:
    """Lets a function fail the n-th time it is called."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException, n: int):
        self.calls, self.failed = 0, False
        work = getattr(owner, name)

        def failing(*arguments: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls == n:
                self.failed = True
                raise error
            return work(*arguments, **more)

        patch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("module", "part", "error"),
    [
        (headstart.engine.prefill, "prefill_by_layers", MemoryError("no room for the prompt")),
        (headstart.engine.pending_step, "step", RuntimeError("this row is broken")),
    ],
)
def test_a_request_that_fails_ends_alone(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, part: str, error: Exception
) -> None:
    with running(max_sequences=4) as server:
        work = getattr(module, part)
        monkeypatch.setattr(module, part, fail_where_marked(work, error))
        answers = all_at_once(server, bad="primes")
        assert healthy(server)
        bad = answers.pop("primes")
        assert isinstance(bad, openai.InternalServerError)
        assert str(error) in bad.message
        assert answers == {topic: expected(topic) for topic in answers}
        assert ask(server, "after") == alone(chat_tokens("after"), max_tokens=LENGTH).text


def test_inside_a_stream_a_failure_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        Once(monkeypatch, headstart.engine.pending_step, "step", RuntimeError("it broke"), n=4)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": LENGTH, "stream": True}
        with server.http() as http:
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            *_, error, done, end = response.text.split("\n\n")
            assert error.startswith('data: {"error":{"message":"RuntimeError: it broke"')
            assert (done, end) == ("data: [DONE]", "")
        Once(monkeypatch, headstart.engine.pending_step, "step", RuntimeError("again"), n=4)
        stream: Any = server.openai().chat.completions.create(model="tiny", **body)  # type: ignore[call-overload]
        with pytest.raises(openai.APIError, match="again"):
            list(stream)
        assert healthy(server)


@pytest.mark.slow  # tests/engine/test_failing_sequences.py has it without a server
def test_a_sampler_that_fails_once_costs_nobody_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(max_sequences=4) as server:
        backend, failed = server.room.engine.model.backend, threading.Event()
        choose = backend.choose

        def failing(logits: Any, *rest: Any) -> Any:
            if logits.shape[0] > 1 and not failed.is_set():  # a sequence that is alone would be the one to blame
                failed.set()
                raise ValueError("bad luck")
            return choose(logits, *rest)

        server.room.engine.warm_up()  # timing steps calls it too
        monkeypatch.setattr(backend, "choose", failing)
        answers = all_at_once(server)
        assert failed.is_set()
        assert answers == {topic: expected(topic) for topic in TOPICS}
        assert healthy(server)
        assert server.metric("headstart_engine_retries_total") == 1
        assert server.metric("headstart_recomputed_sequences_total", reason="failure") >= 2


def test_out_of_memory_in_a_step_ends_the_youngest_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(max_sequences=4) as server:
        work, failed = headstart.engine.pending_step.step, threading.Event()

        def failing(model: Any, batch: Batch, *rest: Any, **sources: Any) -> Any:
            if batch.size == len(TOPICS) and not failed.is_set():
                failed.set()
                raise MemoryError("the device is full")
            return work(model, batch, *rest, **sources)

        monkeypatch.setattr(headstart.engine.pending_step, "step", failing)
        answers = all_at_once(server)
        assert failed.is_set()
        shed = [topic for topic, answer in answers.items() if isinstance(answer, openai.APIStatusError)]
        assert len(shed) == 1
        error = answers.pop(shed[0])
        assert (error.status_code, error.code) == (503, "out_of_memory")  # type: ignore[union-attr]
        assert re.search("memory ran out.* try again.*the device is full", str(error))
        assert answers == {topic: expected(topic) for topic in answers}
        assert healthy(server)


def test_a_dead_engine_thread_is_started_again_and_every_answer_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(max_sequences=4) as server:
        Once(monkeypatch, Engine, "run_once", SystemExit("killed"), n=9)
        answers = all_at_once(server)
        assert answers == {topic: expected(topic) for topic in TOPICS}
        assert healthy(server)
        with server.http() as http:
            told = http.get("/health").json()
        assert (told["restarts"], told["status"]) == (1, "degraded")
        assert told["reason"].startswith("the engine's thread died (SystemExit: killed) and was restarted ")
        assert server.metric("headstart_state", state="degraded") == 1
        assert server.metric("headstart_engine_restarts_total") == 1
        assert server.metric("headstart_recomputed_sequences_total", reason="restart") >= 1
        server.room.close(0)
        with pytest.raises(openai.APIStatusError, match="it is shutting down"):  # that trouble is over
            ask(server, "sorting")


def test_an_engine_thread_that_dies_again_stays_dead_and_the_server_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dying(self: Engine) -> bool:
        raise SystemExit("killed")

    with running() as server:
        assert healthy(server)
        monkeypatch.setattr(Engine, "run_once", dying)
        for _ in range(2):  # who was there, and who comes later
            with pytest.raises(openai.APIStatusError, match="killed") as error:
                ask(server, "sorting")
        assert error.value.status_code == 503
        wait_until(lambda: not healthy(server))
        with server.http() as http:
            assert http.get("/health").status_code == 503
            assert http.get("/health/live").status_code == 503
            assert http.get("/v1/models").status_code == 200
        assert server.metric("headstart_engine_healthy") == 0


def while_reading(patch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    prepare = openai_request.chat_prompt

    async def preparing(make: Any, served: Any, work: Any) -> Any:
        await work.run(happens)
        return await prepare(make, served, work)

    patch.setattr(openai_request, "chat_prompt", preparing)


def test_a_server_that_begins_to_stop_during_prefill_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        while_reading(monkeypatch, lambda: server.room.close(0))
        with pytest.raises(openai.APIStatusError, match="shutting down") as error:
            ask(server, "sorting")
        assert error.value.status_code == 503


def test_an_engine_that_dies_while_a_prompt_is_read_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(self: Engine) -> bool:
        raise SystemExit("killed")

    with running() as server:

        def die() -> None:
            monkeypatch.setattr(Engine, "run_once", dying)
            server.room.submit(Request([5]))
            wait_until(lambda: not server.room.healthy)

        while_reading(monkeypatch, die)
        with pytest.raises(openai.APIStatusError, match="killed") as error:
            ask(server, "sorting")
        assert error.value.status_code == 503


def test_a_web_page_can_read_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(openai_request, "text_prompt", failing)
    origin = "https://page.example"
    with running(cors_origins=(origin,)) as server, server.http() as http:
        response = http.post("/v1/completions", json={"prompt": "a"}, headers={"Origin": origin})
    assert (response.status_code, response.headers.get("access-control-allow-origin")) == (500, origin)
    assert response.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_that_nobody_foresaw_is_counted_and_logged_without_what_was_asked(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    stream: bool,
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        try:
            raise KeyError("the secret prompt")
        except KeyError as error:
            raise ValueError("the secret prompt, told again") from error

    part = (
        (ChoiceOutput, "read") if stream else (headstart.server.openai_request, "text_prompt")
    )  # before and after the status is sent
    monkeypatch.setattr(*part, failing)
    with running(key="sesame") as server, server.http() as http:
        body = {"prompt": "the secret prompt", "max_tokens": 3, "stream": stream}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == (200 if stream else 500)
        assert "internal server error" in response.text
        http.post("/v1/completions", json={"prompt": ["the secret prompt", 5]})
        http.post("/v1/completions", json=body, headers={"Authorization": "Bearer sesame2"})
    logged = caplog.text + "".join(capfd.readouterr())
    assert "ValueError" in logged
    assert "KeyError" in logged
    assert "test_faults.py" in logged
    assert "secret prompt" not in logged.replace('raise KeyError("the secret prompt")', "").replace(
        'raise ValueError("the secret prompt, told again")', ""
    )
    assert "sesame" not in logged


def test_requests_that_go_well_or_are_refused_are_not_logged(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING, "uvicorn.access")
    with running(key="sesame") as server, server.http() as http:
        body: dict[str, Any] = {"prompt": "the secret prompt", "max_tokens": 3}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json=body | {"stop": 5}).status_code == 400
        assert (
            http.post("/v1/completions", json=body, headers={"x-api-key": "b", "Authorization": ""}).status_code
            == 401
        )
        assert http.get("/health?key=sesame").status_code == 200
    logged = caplog.text + "".join(capfd.readouterr())
    assert "secret" not in logged
    assert "sesame" not in logged


def test_a_server_whose_device_is_lost_says_so_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, running() as server:
        patch.setattr(Server, "on_tick", uvicorn.Server.on_tick)  # it does not stop yet
        Once(patch, headstart.engine.pending_step, "step", RuntimeError(IGNORED), n=4)
        for _ in range(2):  # who was there, and who comes later
            with pytest.raises(openai.APIStatusError, match="driver ignores this process") as error:
                ask(server, "sorting")
            assert error.value.status_code == 503
        assert not healthy(server)
        with server.http() as http:
            told = http.get("/health").json()
        assert (told["restarts"], told["status"]) == (0, "unhealthy")
        assert "SubmissionsIgnored" in told["reason"]
        assert server.metric("headstart_engine_healthy") == 0
        patch.undo()
        wait_until(lambda: refuses(server))
