"""The states of a server, by the order of what happens: what it answers before its models are known, and after."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from running import CONTEXT, HANG, Starting, folder, pooled_model, running, starting, wait_until

import headstart.server.states
from headstart.engine import DeviceThread
from headstart.engine.recovery import Trouble
from headstart.models import Model
from headstart.server.middleware import Keys
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel

BODY: dict[str, Any] = {"prompt": "one", "max_tokens": 3}


def client(start: Starting) -> httpx.Client:
    return httpx.Client(base_url=start.url, timeout=HANG)


def slow_model(loads: threading.Event) -> PooledModel:
    """A model that is not read before `loads` is set."""
    model, known = PooledModel.of(folder(True, CONTEXT), id="tiny"), pooled_model()

    def load(progress: Any) -> Model:
        assert loads.wait(HANG)
        return known.read()

    return replace(model, load=load, load_tokenizer=known.load_tokenizer)


def health(http: httpx.Client) -> tuple[int, str, str | None]:
    response = http.get("/health")
    return response.status_code, response.json()["status"], response.json()["reason"]


def test_before_its_models_are_known_it_says_so_and_requests_wait() -> None:
    loads = threading.Event()
    with starting() as start, client(start) as http, ThreadPoolExecutor(2) as clients:
        assert health(http) == (503, "starting", "importing libraries")
        assert http.get("/health/live").status_code == 200
        assert [(each["id"], each["state"]) for each in http.get("/v1/models").json()["data"]] == [
            ("tiny", "loading")
        ]
        waiting = [clients.submit(httpx.post, f"{start.url}/v1/completions", json=BODY, timeout=HANG)]
        waiting.append(clients.submit(httpx.get, f"{start.url}/", timeout=HANG))  # the dashboard
        wait_until(lambda: len(start.server.server_state.tasks) == 2)
        pool = ModelPool(DeviceThread(), [model := slow_model(loads)])
        start.open(pool, ready=False)
        assert waiting[1].result().status_code == 200
        wait_until(lambda: model.waiters)  # the request is read, and waits for its model
        assert health(http)[:2] == (503, "starting")
        assert http.get("/v1/models").json()["data"][0]["state"] == "loading"
        with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith(": tiny is loading")
            assert not waiting[0].done()
            loads.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert waiting[0].result().status_code == 200
        start.state.doing = None
        assert health(http) == (200, "ok", None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/messages", {"messages": [{"role": "user", "content": "one"}], "max_tokens": 3}),
    ],
)
def test_a_request_waits_for_a_server_that_starts_only_so_long(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headstart.server.states, "WAIT_SECONDS", 0.01)
    with starting() as start, client(start) as http:
        refused = http.post(path, json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "this server is starting (importing libraries)" in refused.json()["error"]["message"]


def test_a_server_that_cannot_start_answers_those_who_wait() -> None:
    with ThreadPoolExecutor(1) as clients:
        with starting() as start:
            waiting = clients.submit(httpx.post, f"{start.url}/v1/completions", json=BODY, timeout=HANG)
            wait_until(lambda: start.server.server_state.tasks)
        refused = waiting.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")


def test_a_server_that_starts_asks_for_its_key() -> None:
    with starting(keys=Keys(["sesame"])) as start, client(start) as http:
        for path in ("/v1/models", "/v1/settings"):
            assert http.get(path).status_code == 401
        assert http.get("/v1/models", headers={"x-api-key": "sesame"}).status_code == 200
        assert http.get("/health/live").status_code == 200


def test_trouble_of_the_device_degrades_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.http() as http:
        server.room.engine.recovery.trouble = Trouble("a command failed on the device")
        status, state, reason = health(http)
        assert (status, state) == (200, "degraded")
        assert reason is not None
        assert reason.startswith("a command failed on the device 0 s ago")
        assert server.metric("headstart_state", state="degraded") == 1
        assert server.metric("headstart_state", state="ok") == 0
        server.room.device.remove(server.room.engine)  # its model is unloaded
        assert health(http)[1] == "degraded"
        monkeypatch.setattr(headstart.server.states, "TROUBLE_SECONDS", 0.0)
        assert health(http) == (200, "ok", None)


def test_a_failed_step_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.http() as http:
        iterate, failing = server.room.engine._step, iter([RuntimeError("[malloc] Unable to allocate 5 bytes.")])

        def step() -> None:
            if (error := next(failing, None)) is not None:
                raise error
            iterate()

        monkeypatch.setattr(server.room.engine, "_step", step)
        http.post("/v1/completions", json=BODY)  # it ends with an error, or goes on
        wait_until(lambda: health(http)[:2] == (200, "degraded"))
        assert str(health(http)[2]).startswith("memory ran out ")


def test_a_process_that_replaced_another_is_degraded_for_a_while() -> None:
    with running() as server, server.http() as http:
        server.server._state.restarted = ("the process was started anew (the GPU ignored it)", 0.0)
        assert health(http)[1] == "ok"
        server.server._state.restarted = (server.server._state.restarted[0], Trouble("now").when)
        assert str(health(http)[2]).startswith("the process was started anew (the GPU ignored it) 0 s ago")


def test_a_start_that_is_interrupted_leaves_no_thread_behind() -> None:
    """Or the process would end while something is computed."""
    before = threading.enumerate()
    loads = threading.Event()
    with pytest.raises(KeyboardInterrupt), starting(deadline=HANG) as start:  # noqa: PT012
        start.open(ModelPool(DeviceThread(), [model := slow_model(loads)]), ready=False)
        loading = start.server.call(start.state.pool.load(model))  # type: ignore[union-attr]
        wait_until(lambda: model.loading)
        loads.set()
        raise KeyboardInterrupt
    assert loading.done()
    assert not [
        each.name for each in threading.enumerate() if each not in before and each.name in ("device", "http_0")
    ]
