"""Prompts wait to be read as requests wait to be answered: not too many, not too long, not for who has gone."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from running import Running, running, wait_until

from headstart.server import Limits, Served

COMPLETIONS = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Desk:
    """Reads no prompt before it is opened."""

    def __init__(self) -> None:
        self.opened, self.begun = threading.Event(), list[Any]()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    here, read = Desk(), Served.read_text

    def waiting(self: Served, prompt: Any, *rest: Any) -> Any:
        here.begun.append(prompt)
        here.opened.wait(60)
        return read(self, prompt, *rest)

    monkeypatch.setattr(Served, "read_text", waiting)
    yield here
    here.opened.set()


def ask(server: Running, prompt: str) -> httpx.Response:
    with server.http() as http:
        return http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2})


def asking(server: Running, prompt: str) -> socket.socket:
    """A client that has asked, and may go at any time."""
    host, port = server.url.removeprefix("http://").split(":")
    body = f'{{"prompt": "{prompt}", "max_tokens": 2}}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client = socket.create_connection((host, int(port)))
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return client


def outcome(server: Running, name: str) -> float:
    return server.metric("headstart_requests_total", endpoint=COMPLETIONS, outcome=name)


def test_no_more_prompts_wait_to_be_read_than_requests_may_wait(desk: Desk) -> None:
    with running(max_queue=2) as server, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, server, "the first")
        wait_until(lambda: desk.begun)
        others = [pool.submit(ask, server, f"another {i}") for i in range(6)]
        wait_until(lambda: sum(other.done() for other in others) == 4)
        refused = [other.result() for other in others if other.done()]
        assert [answer.status_code for answer in refused] == [429] * 4
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        with server.http() as http:
            assert http.post("/v1/messages/count_tokens", json=CHAT).status_code == 429
        desk.opened.set()
        answers = [first.result(), *(other.result() for other in others)]
    told = sorted(answer.status_code for answer in answers)
    assert told[:2] == [200] * 2  # read at once, the third may find these two waiting for the engine
    assert told[3:] == [429] * 4


def test_time_spent_waiting_to_be_read_counts(desk: Desk) -> None:
    with running(limits=Limits(request_seconds=0.5)) as server, ThreadPoolExecutor(2) as pool:
        answers = [asked.result() for asked in [pool.submit(ask, server, "a"), pool.submit(ask, server, "b")]]
        assert [answer.json()["error"]["code"] for answer in answers] == ["timeout"] * 2
        assert outcome(server, "timeout") == 2
        desk.opened.set()
        wait_until(lambda: ask(server, "and now").status_code == 200)
        assert len({"a", "b"} & set(desk.begun)) == 1  # the other was not read, since nobody waited for it


def test_a_prompt_is_not_read_for_a_client_that_has_gone(desk: Desk) -> None:
    with running() as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server, "the first")
        wait_until(lambda: desk.begun)
        with asking(server, "gone"):
            pass
        wait_until(lambda: outcome(server, "cancelled") == 1)
        desk.opened.set()
        assert first.result().status_code == 200
        assert ask(server, "the last").status_code == 200
    assert desk.begun == ["the first", "the last"]
