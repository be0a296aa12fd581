"""Keys, settings, health, cancelling, clients that vanish or dawdle, and stopping in mid-stream."""

import asyncio
import json
import socket
import sys
import threading
import time
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI
from running import Running, alone, chat_tokens, running, tokenizer, wait_until
from starlette.datastructures import Headers
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from headstart.errors import RequestError
from headstart.server.listen import Connection, Pool
from headstart.server.middleware import Keys, check_reach, client_of
from headstart.server.settings import Limits
from headstart.state import PrefixCache

HI = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 3000, "extra_body": {"min_tokens": 3000}}


def idle(server: Running) -> bool:
    return server.room.running + server.room.prefilling + server.room.queued == 0


def cancelled(server: Running) -> float:
    return server.metric("headstart_requests_total", endpoint="/v1/chat/completions", outcome="cancelled")


def test_without_the_key_only_health_and_metrics_are_open() -> None:
    with running(key="sesame") as server, httpx.Client(base_url=server.url) as stranger:
        for path in (
            "/v1/models",
            "/v1/settings",
            "/v1/cache",
            "/v1/mtp/stats",
            "/v1/mtp/tokens",
            "/openapi.json",
            "/nothing",
        ):
            response = stranger.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert stranger.post("/v1/chat/completions", content=b"not even JSON").status_code == 401
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/metrics").status_code == 200
        probed = stranger.head("/health")
        assert (probed.status_code, probed.content) == (200, b"")
        assert stranger.head("/v1/models").status_code == 401
        for headers in (
            {"Authorization": "Bearer sesam"},
            {"Authorization": "Basic sesame"},
            {"Authorization": "sesame"},
            {"x-api-key": "Sesame"},
            {"x-api-key": ""},
        ):
            assert stranger.get("/v1/models", headers=headers).status_code == 401, headers
        for headers in (
            {"Authorization": "Bearer sesame"},
            {"x-api-key": "sesame"},
            {"authorization": "bearer sesame"},
        ):
            assert stranger.get("/v1/models", headers=headers).status_code == 200, headers
        assert server.openai().models.list().data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="guess").models.list()


def test_any_of_several_keys_opens() -> None:
    keys = Keys(["one", "two"])
    assert [keys.allows(Headers({"x-api-key": key})) for key in ("one", "two", "three", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert Keys().allows(Headers({}))
    for bad in ("", " x", "schlüssel", "a\nb"):
        with pytest.raises(RequestError):
            Keys([bad])


@pytest.mark.parametrize(
    ("host", "safe"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.5", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_nobody_listens_beyond_this_machine_without_a_key(host: str, safe: bool) -> None:
    check_reach(host, Keys(["secret"]), no_key=False)
    check_reach(host, Keys(), no_key=True)
    if safe:
        check_reach(host, Keys(), no_key=False)
    else:
        with pytest.raises(RequestError, match="--api-key"):
            check_reach(host, Keys(), no_key=False)


def test_web_pages_may_call_only_where_their_origin_was_named(server: Running) -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with server.http() as http:
        assert "access-control-allow-origin" not in http.options("/v1/chat/completions", headers=ask).headers
        assert "access-control-allow-origin" not in http.get("/health", headers=ask).headers
    with running(cors_origins=("https://page.example",), key="k") as named, httpx.Client(base_url=named.url) as http:
        assert http.options("/v1/models", headers=ask).headers["access-control-allow-origin"] == ask["Origin"]
        other = ask | {"Origin": "https://other.example"}
        assert "access-control-allow-origin" not in http.options("/v1/models", headers=other).headers


def test_settings_apply_to_what_comes_after() -> None:
    with running() as server, server.http() as http:
        body = {"messages": HI, "max_tokens": 12}
        before = http.post("/v1/chat/completions", json=body).json()
        told: dict[str, Any] = {"speculation": True, "max_k": 8}
        assert http.get("/v1/settings").json() == told
        assert http.patch("/v1/settings", json={"max_k": 1}).json() == told | {"max_k": 1}
        asked = body | {"num_draft_tokens": 5}
        stats = http.post("/v1/chat/completions", json=asked).json()["generation_stats"]
        assert (stats["num_draft_tokens_clamped_to"], len(stats["acceptance_by_position"])) == (1, 1)
        told |= {"speculation": False, "max_k": 1}
        assert http.patch("/v1/settings", json={"speculation": False}).json() == told
        after = http.post("/v1/chat/completions", json=body).json()
        assert after["generation_stats"]["drafter_kind"] is None
        assert after["generation_stats"]["bypass_reason"]
        assert after["choices"] == before["choices"]
        for wrong in ({"max_k": 16}, {"max_k": -1}, {"max_k": "2"}, {"speculation": 1}, {"speculations": True}):
            refusal = http.patch("/v1/settings", json=wrong)
            assert refusal.status_code == 400
            assert refusal.json()["error"]["param"] == next(iter(wrong))
        assert http.get("/v1/settings").json() == told


def test_messages_have_plain_numbers_and_one_period() -> None:
    with running(head=False) as server, server.http() as http:

        def message(**fields: Any) -> str:
            return str(http.post("/v1/completions", json={"prompt": "a"} | fields).json()["error"]["message"])

        assert message(top_k=-2) == "top_k is -2; it must be a whole number from 0 to 2147483647"
        refused = message(num_draft_tokens=3)
        assert "brings it back. Use" in refused
        assert ".." not in refused


def test_the_prefix_cache_can_be_read_and_cleared() -> None:
    with running(prefix=PrefixCache(10**8, chunk=512)) as server, server.http() as http:
        prompt = tokenizer().encode("word " * 600)
        body = {"prompt": list(prompt), "max_tokens": 4}
        first = http.post("/v1/completions", json=body).json()
        second = http.post("/v1/completions", json=body).json()
        assert first["choices"] == second["choices"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 512
        assert second["generation_stats"]["prefix_cache_hit"] == 512
        told = http.get("/v1/cache").json()
        assert told["enabled"]
        assert (told["hits"], told["tokens"]) == (1, 512)
        assert told["bytes"] > 0
        assert server.metric("headstart_cached_prompt_tokens_total") == 512
        assert http.delete("/v1/cache").json()["entries"] == 0
        assert http.get("/v1/cache").json()["bytes"] == 0


def test_a_server_without_a_prefix_cache_reports_it(server: Running) -> None:
    with server.http() as http:
        assert http.get("/v1/cache").json() == http.delete("/v1/cache").json() == {"enabled": False}


def test_a_request_can_be_cancelled_by_its_id(server: Running) -> None:
    stream = server.openai().chat.completions.create(**LONG, stream=True)
    first = next(stream)
    with server.http() as http:
        assert http.post(f"/v1/requests/{first.id}/cancel").json() == {"id": first.id, "cancelled": True}
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "cancelled"
        assert len(rest) < 1000
        wait_until(lambda: idle(server))
        assert http.post(f"/v1/requests/{first.id}/cancel").status_code == 404


def test_a_response_that_is_cancelled_does_not_end_as_completed(server: Running) -> None:
    stream = server.openai().responses.create(model="tiny", input="hi", stream=True, extra_body={"min_tokens": 3000})
    events: list[Any] = []
    cancelled_once = False
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta" and not cancelled_once:
            assert cancel(server, events[0].response.id) == 200
            cancelled_once = True
    last = events[-1]
    assert last.type == "response.incomplete"
    assert (last.response.status, last.response.output[-1].status) == ("cancelled", "incomplete")


def cancel(server: Running, id: str, **client: Any) -> int:
    with httpx.Client(base_url=server.url, timeout=60, **client) as http:
        response, unknown = (http.post(f"/v1/requests/{each}/cancel") for each in (id, id[::-1]))
    if response.status_code != 200:  # like an id that nobody has
        assert response.json() == json.loads(unknown.text.replace(id[::-1], id))
    return response.status_code


def test_only_the_key_that_started_a_request_cancels_it() -> None:
    with running(key="mine", other_keys=("another",)) as server:
        stream = server.openai().chat.completions.create(**LONG, stream=True)
        first = next(stream)
        assert cancel(server, first.id, headers={"x-api-key": "another"}) == 404
        next(stream)
        assert cancel(server, first.id, headers={"x-api-key": "mine"}) == 200
        assert list(stream)[-1].choices[0].finish_reason == "cancelled"


@pytest.mark.skipif(sys.platform != "linux", reason="another loopback address has to be set up first")
def test_a_key_sees_the_counts_of_its_own_tokens_alone() -> None:
    with running(key="mine", other_keys=("another",)) as server, server.http() as http:
        body = {"prompt": "one", "max_tokens": 5, "min_tokens": 5}
        for key, times in (("mine", 1), ("another", 2)):
            for _ in range(times):
                assert http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).is_success
        counts = [
            http.get("/v1/mtp/tokens", headers={"Authorization": "", "x-api-key": key}).json()["models"]["tiny"]
            for key in ("mine", "another")
        ]
        assert [sum(each.values()) for each in counts] == [5, 10]


def test_without_keys_only_the_address_that_started_a_request_cancels_it(server: Running) -> None:
    stream = server.openai().chat.completions.create(**LONG, stream=True)
    first = next(stream)
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
    assert cancel(server, first.id, transport=elsewhere) == 404
    next(stream)
    assert cancel(server, first.id) == 200
    assert list(stream)[-1].choices[0].finish_reason == "cancelled"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_a_header_does_not_change_a_clients_address(server: Running) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as elsewhere:
        stream = server.openai(http_client=elsewhere).chat.completions.create(**LONG, stream=True)
        first = next(stream)
        assert cancel(server, first.id, headers={"X-Forwarded-For": "127.0.0.2"}) == 404
        stream.close()


def test_a_client_that_leaves_in_mid_stream_frees_its_sequence(server: Running) -> None:
    before = cancelled(server)
    with server.openai().chat.completions.create(**LONG, stream=True) as stream:
        for _ in range(5):
            next(stream)
        assert server.room.running == 1
    wait_until(lambda: idle(server) and cancelled(server) == before + 1)


def connected(server: Running, fields: dict[str, Any]) -> socket.socket:
    """A client that has asked, and has next to no room for what comes."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": HI, "max_tokens": 4000, "min_tokens": 4000, **fields}).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((host, int(port)))
    client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + body)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_during_prefill_frees_its_sequence(
    server: Running, gate: threading.Event, stream: bool
) -> None:
    before, said = cancelled(server), server.metric("headstart_generation_tokens_total")
    long = [{"role": "user", "content": "word " * 2000}]
    with connected(server, {"messages": long, "stream": stream, "max_tokens": 9, "min_tokens": 9}):
        wait_until(lambda: server.room.prefilling)
    wait_until(lambda: server.room.engine.scheduler.prefilling[0].handle.cancelled)
    gate.set()
    wait_until(lambda: idle(server) and cancelled(server) == before + 1)
    assert server.metric("headstart_generation_tokens_total") == said


def test_a_client_that_leaves_without_streaming_frees_its_sequence(server: Running) -> None:
    before = cancelled(server)
    with connected(server, {}):
        wait_until(lambda: server.room.running)
    wait_until(lambda: idle(server) and cancelled(server) == before + 1)


def test_a_client_that_reads_nothing_holds_nobody_up_and_is_cut_off() -> None:
    with (
        running(limits=Limits(stall_seconds=0.5), max_sequences=2, send_buffer=4096) as server,
        connected(server, {"stream": True, "include_origins": True}) as client,
    ):
        port = client.getsockname()[1]
        wait_until(lambda: port in server.ports)
        wait_until(lambda: server.room.running)
        answer = server.openai().chat.completions.create(model="tiny", messages=HI, max_tokens=12)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == alone(chat_tokens("hi"), max_tokens=12).text
        wait_until(lambda: idle(server) and cancelled(server) == 1)
        wait_until(lambda: port not in server.ports)  # though it never reads the rest


def test_a_whole_answer_that_is_not_read_does_not_keep_the_connection() -> None:
    with (
        running(limits=Limits(stall_seconds=0.5), send_buffer=4096) as server,
        connected(server, {"logprobs": True, "top_logprobs": 9, "max_tokens": 100, "min_tokens": 100}) as client,
    ):
        port = client.getsockname()[1]
        path = {"endpoint": "/v1/chat/completions", "outcome": "length"}
        wait_until(lambda: server.metric("headstart_requests_total", **path) == 1)
        wait_until(lambda: port not in server.ports)


class Pipe(asyncio.Transport):
    """Holds what has not been read yet."""

    def __init__(self, unread: int):
        super().__init__()
        self.unread, self.aborted = unread, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    async def watch() -> None:
        pipe = Pipe(unread=100)
        limits = Limits(stall_seconds=0.05)
        state = {"limits": limits, "pool": Pool(limits)}
        connection = Connection(uvicorn.Config(FastAPI(), http=Connection), ServerState(), state)
        connection.transport, connection.flow = pipe, FlowControl(pipe)
        connection.pause_writing()
        for unread in (70, 40):  # it takes several times as long as it may read nothing
            pipe.unread = unread
            before = connection._stall_timer
            while connection._stall_timer is before:
                await asyncio.sleep(0.01)
            assert not pipe.aborted
        while not pipe.aborted:  # and now it reads no more
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(watch(), 60))


def test_a_body_that_is_too_long_in_coming_is_not_waited_for() -> None:
    with running(limits=Limits(body_seconds=0.5)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}{{".encode())
            answer = b"".join(iter(lambda: client.recv(4096), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request body not received" in answer


def test_a_key_that_nobody_asked_for_makes_nobody_a_client_of_their_own() -> None:
    def client(key: str, keys: Keys, machine: str = "10.0.0.1") -> str:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return client_of({"type": "http", "headers": headers, "client": (machine, 1234)}, keys)

    assert client("one", Keys()) == client("two", Keys()) != client("one", Keys(), machine="10.0.0.2")
    keys = Keys(["one", "two"])
    assert client("one", keys) != client("two", keys)
    assert client("one", keys) == client("one", keys, machine="10.0.0.2")
    assert "one" not in client("one", keys)


def test_a_request_that_takes_too_long_ends_with_an_error() -> None:
    with running(limits=Limits(request_seconds=1.5)) as server:
        client = server.openai()
        client.chat.completions.create(model="tiny", messages=HI, max_tokens=2)  # type: ignore[arg-type]
        with pytest.raises(openai.APIStatusError) as error:
            client.with_options(max_retries=2).chat.completions.create(**LONG)
        assert (error.value.status_code, error.value.code) == (408, "timeout")
        assert server.metric("headstart_requests_total", endpoint="/v1/chat/completions", outcome="timeout") == 1
        with pytest.raises(openai.APIError, match="not finished within"):
            list(client.chat.completions.create(**LONG, stream=True))
        wait_until(lambda: idle(server))


def test_stopping_lets_running_answers_end() -> None:
    expected = alone(chat_tokens("hi"), max_tokens=100, min_tokens=100).text
    fields = LONG | {"max_tokens": 100, "extra_body": {"min_tokens": 100}}
    with running(deadline=60) as server:
        stream = server.openai().chat.completions.create(**fields, stream=True)
        chunks = [next(stream)]
        wait_until(lambda: server.room.running)
    chunks += list(stream)  # it was sent before the server had stopped
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_stopping_ends_what_is_left_at_the_deadline_with_an_error() -> None:
    began = time.monotonic()
    with running(deadline=0.5) as server:
        stream = server.openai().chat.completions.create(**LONG | {"max_tokens": 4000}, stream=True)
        next(stream)
        wait_until(lambda: server.room.running)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert time.monotonic() - began < 30


def test_health_tells_who_is_inside(server: Running, gate: threading.Event) -> None:
    with server.http() as http:
        told = http.get("/health").json()
        assert told == {
            "status": "ok", "reason": None, "model": "tiny", "restarts": 0,
            "running": 0, "prefilling": 0, "queued": 0,
        }  # fmt: skip
        with server.openai().chat.completions.create(**LONG, stream=True):
            wait_until(lambda: http.get("/health").json()["prefilling"] == 1)
            gate.set()
            wait_until(lambda: http.get("/health").json()["running"] == 1)
        wait_until(lambda: idle(server))


def test_a_client_has_so_many_requests_at_a_time() -> None:
    with running(key="first", other_keys=("second",), limits=Limits(requests_per_client=1)) as server:
        client, other = server.openai(), server.openai().with_options(api_key="second")
        with client.chat.completions.create(**LONG, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError, match="1 of your requests") as busy:
                client.responses.create(model="tiny", input="hi")
            assert busy.value.response.headers["retry-after"] == "1"
            assert other.responses.create(model="tiny", input="hi", max_output_tokens=2).status == "incomplete"
        wait_until(lambda: idle(server))
        assert client.responses.create(model="tiny", input="hi", max_output_tokens=2).status == "incomplete"


@pytest.mark.parametrize(
    ("priority", "level"), [("interactive", 0), ("batch", 1), (None, 0), (0, 0), (7, 7), (-5, 0), (10**9, 100)]
)
def test_a_request_has_its_priority(
    server: Running, monkeypatch: pytest.MonkeyPatch, priority: str | int | None, level: int
) -> None:
    found: list[int] = []
    submit = server.room.submit
    monkeypatch.setattr(
        server.room, "submit", lambda request, **rest: (found.append(request.priority), submit(request, **rest))[1]
    )
    known: dict[str, Any] = {"model": "tiny", "extra_body": {"priority": priority}}
    server.openai().chat.completions.create(**known, messages=HI, max_tokens=1)
    server.openai().completions.create(**known, prompt="hi", max_tokens=1)
    server.openai().responses.create(**known, input="hi", max_output_tokens=1)
    server.anthropic().messages.create(**known, messages=HI, max_tokens=1)
    assert found == [level] * 4
