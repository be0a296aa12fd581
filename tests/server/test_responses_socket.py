"""Responses over web sockets: one after another, continued on the connection, and whoever may not connect."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import Any

import pytest
from running import Running, running, wait_until
from scripted import ScriptedRoom, scripted
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection, connect

from headstart.server import responses_routes
from headstart.server.settings import Limits

Here = tuple[Running, ScriptedRoom]
PATH = "/v1/responses"
LONG = {"input": "Hello", "max_output_tokens": 4000, "min_tokens": 4000}


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3, key="first", limits=Limits(body_bytes=2**16)) as server:
        yield server


@contextmanager
def socket(server: Running, path: str = PATH, key: str = "first", **headers: str) -> Iterator[ClientConnection]:
    url = server.url.replace("http", "ws") + path
    all_headers = {"Authorization": f"Bearer {key}"} | headers
    with connect(url, additional_headers=all_headers, compression=None, close_timeout=1, max_size=None) as client:
        yield client


def create(client: ClientConnection, **fields: Any) -> None:
    client.send(json.dumps({"type": "response.create", "input": "Hello"} | fields))


def answer(client: ClientConnection) -> list[dict[str, Any]]:
    """Return the events up to the last of an answer."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "error"):
        events.append(json.loads(client.recv(60)))
    return events


def ask(client: ClientConnection, **fields: Any) -> dict[str, Any]:
    """Return the last event of an answer."""
    create(client, **fields)
    return answer(client)[-1]


def text(event: dict[str, Any]) -> str:
    return "".join(part["text"] for item in event["response"]["output"] for part in item["content"])


def test_messages_are_answered_in_turn_with_the_events_of_a_stream(here: Here) -> None:
    here[1].scripts.extend(["One.", "Two.", "Three."])
    with socket(here[0]) as client:
        create(client, input="1")
        create(client, input="2", stream=True)  # as Codex does
        first, second = answer(client), answer(client)
    with here[0].http() as http:
        lines = http.post(PATH, json={"input": "3", "stream": True}).text.splitlines()
    streamed = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [text(events[-1]) for events in (first, second, streamed)] == ["One.", "Two.", "Three."]
    for events in (first, second, streamed):
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert {event["type"] for event in first} == {event["type"] for event in streamed}


def test_a_connection_continues_what_is_not_stored(here: Here) -> None:
    here[1].scripts.extend(["One.", "Two.", "Three."])
    with socket(here[0]) as client:
        first = ask(client, store=False)["response"]["id"]
        assert text(ask(client, store=False, previous_response_id=first, input="And?")) == "Two."
        assert {"One.", "Hello"} <= set(_prompt(here).replace("<|im_end|>", "\n").splitlines())
        missing = ask(client, store=False, previous_response_id=first)
        assert missing["error"]["code"] == "previous_response_not_found", "only the last one is kept"
        last = ask(client, store=False)["response"]["id"]
        with socket(here[0]) as other:
            missing = ask(other, store=False, previous_response_id=last)
            assert (missing["status"], missing["error"]["param"]) == (400, "previous_response_id")


def test_a_response_that_fails_takes_along_what_it_continues(here: Here) -> None:
    here[1].scripts.extend(["One.", "Two."])
    orphan = [{"type": "function_call_output", "call_id": "call_9", "output": "rain"}]
    with socket(here[0]) as client:
        first = ask(client, store=False)["response"]["id"]
        failed = ask(client, previous_response_id=first, input=orphan)
        assert "'call_9'" in failed["error"]["message"]
        assert ask(client, previous_response_id=first)["error"]["code"] == "previous_response_not_found"
        stored = ask(client)["response"]["id"]
        assert ask(client, previous_response_id=stored, input=orphan)["type"] == "error"
        here[1].scripts.append("Three.")
        assert text(ask(client, previous_response_id=stored)) == "Three.", "one that is stored is still there"


def test_a_prompt_may_be_read_before_its_answer_is_wanted(here: Here) -> None:
    here[1].scripts.extend(["x", "Yes."])
    with socket(here[0]) as client:
        read = ask(client, generate=False, store=False, input="Remember cobalt.")["response"]
        assert (read["status"], read["output"], here[1].requests[-1].params.max_tokens) == ("completed", [], 1)
        assert text(ask(client, store=False, previous_response_id=read["id"], input="Well?")) == "Yes."
    assert "cobalt" in _prompt(here)


def _prompt(here: Here) -> str:
    return str(here[0].served.tokenizer.decode(list(here[1].requests[-1].prompt)))


@pytest.mark.parametrize(
    ("headers", "path", "status"),
    [
        ({"key": "second"}, PATH, 401),
        ({"Origin": "https://evil.example"}, PATH, 403),
        ({"Origin": "null"}, PATH, 403),
        ({}, "/v1/chat/completions", 405),
        ({}, "/v1/nothing", 404),
    ],
)
def test_who_may_not_connect_is_refused(here: Here, headers: Any, path: str, status: int) -> None:
    with pytest.raises(InvalidStatus) as refused, socket(here[0], path, **headers):
        pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body or b"")["error"]["message"]


def test_a_page_of_this_server_may_connect(here: Here) -> None:
    here[1].scripts.append("Yes.")
    with socket(here[0], Origin=here[0].url) as client:
        assert text(ask(client)) == "Yes."


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("", "invalid_json"),
        ("[1", "invalid_json"),
        ("[" * 50_000, "invalid_json"),
        ("5", "invalid_value"),
        ('{"type": "response.cancel"}', "invalid_value"),
        ('{"type": "response.create", "input": 5}', "invalid_value"),
        ('{"type": "response.create", "input": "a", "background": true}', "unsupported"),
        ('{"type": "response.create", "input": [' + "0," * 30_000 + "0]}", "invalid_value"),
        (b"\xff\xfe", "invalid_json"),
    ],
)
def test_a_hostile_message_is_an_error_and_the_connection_goes_on(here: Here, message: Any, code: str) -> None:
    here[1].scripts.append("Yes.")
    with socket(here[0]) as client:
        client.send(message)
        (error,) = answer(client)
        assert (error["status"], error["error"]["code"]) == (400, code)
        assert text(ask(client)) == "Yes."


def _send(client: ClientConnection, message: Any) -> None:
    client.send(message)
    client.recv(60)


def _fragments(count: int, size: int = 1) -> Iterator[str]:
    yield from (" " * size for _ in range(count))


@pytest.mark.parametrize(
    ("message", "code"),
    [(" " * 2**17, CloseCode.MESSAGE_TOO_BIG), (list(_fragments(2000)), CloseCode.MESSAGE_TOO_BIG)],
    ids=["too large", "of too many frames"],
)
def test_a_message_without_bounds_closes_the_connection(here: Here, message: Any, code: CloseCode) -> None:
    with socket(here[0]) as client:
        with pytest.raises(ConnectionClosed) as closed:
            _send(client, message)
        assert closed.value.rcvd is None or closed.value.rcvd.code == code
    here[1].scripts.append("Yes.")
    with socket(here[0]) as client:
        assert text(ask(client)) == "Yes."


@pytest.mark.parametrize(
    "frame",
    [
        b"\x81\x05hello",  # unmasked
        b"\xc1\x85\0\0\0\0hello",  # a reserved bit
        b"\x83\x85\0\0\0\0hello",  # an opcode that does not exist
        b"\x09\x85\0\0\0\0hello",  # a ping in fragments
        b"\x81\x82\0\0\0\0\xff\xfe",  # not UTF-8
        b"\x80\x85\0\0\0\0hello",  # continues nothing
        b"\x81\xff" + b"\xff" * 12,  # of 2**64 bytes
    ],
)
def test_frames_that_break_the_protocol_close_the_connection(here: Here, frame: bytes) -> None:
    with socket(here[0]) as client:
        client.socket.sendall(frame)
        with pytest.raises(ConnectionClosed):
            client.recv(60)


def test_a_connection_ends_in_time(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_routes, "SOCKET_SECONDS", 0.01)
    with socket(here[0]) as client:
        (error,) = answer(client)
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            client.recv(60)


def test_a_response_is_cancelled_when_its_client_goes() -> None:
    with running(key="first") as server:
        with socket(server) as client:
            create(client, **LONG)
            while json.loads(client.recv(60))["type"] != "response.output_text.delta":
                pass
            client.socket.close()
        wait_until(lambda: server.metric("headstart_requests_total", endpoint=PATH, outcome="cancelled") == 1)


def test_a_connection_counts_and_gives_way_when_idle() -> None:
    limits = Limits(connections=4)  # half of them for one client
    with running(key="first", limits=limits) as server, ExitStack() as stack:
        sockets = [stack.enter_context(socket(server)) for _ in range(4)]
        with pytest.raises(ConnectionClosed):
            sockets[0].recv(60)


def test_an_answer_is_finished_before_the_server_stops() -> None:
    with running(key="first", deadline=60.0) as server, socket(server) as client:
        create(client, input="Hello", max_output_tokens=200, min_tokens=200)
        client.recv(60)
        stop = Thread(target=lambda: setattr(server.server, "should_exit", True))
        stop.start()
        assert answer(client)[-1]["type"] == "response.incomplete"
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(60)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == CloseCode.SERVICE_RESTART
        stop.join()
