"""Connections that send nothing, too much, too slowly, or no HTTP, and clients that do not read."""

import asyncio
import errno
import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response
from hostile import SMALL, Target, connect, target
from running import running, wait_until

from headstart.errors import RequestError
from headstart.server.listen import Pool, connection_limit
from headstart.server.request_handler import RequestHandler
from headstart.server.settings import Limits

FILES = 512  # descriptors of the server process: more than 384 connections cannot be open
LONG = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "min_tokens": 4000}


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    """A process whose hard limit is one with which mlx-lm could not even be imported."""
    with target("--no-mtp", preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, FILES))) as here:
        here.small()
        yield here
        here.assert_serving()
        assert "Traceback" not in here.log()
        assert len(here.log().splitlines()) < 20  # however many there were


def post(path: str, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if not any(line.startswith(("Content-Length", "Transfer-Encoding")) for line in headers):
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "Host: localhost", *headers]).encode() + b"\r\n\r\n"


CLOSE = "Connection: close"
CHAT = "/v1/chat/completions"
MANY = [f"x-{i}: {i}" for i in range(40_000)]


@dataclass(frozen=True)
class Bytes:
    """Bytes on a connection, and what must come back: the status of each answer, and the code of the last."""

    name: str
    sent: bytes
    statuses: tuple[int, ...]
    code: str | None = None


CASES = [
    Bytes("garbage", b"\x00\xff" * 1000 + b"\r\n\r\n", (400,)),
    Bytes("only line ends", b"\r\n" * 50_000, (400,)),
    Bytes("HTTP/0.9", b"GET /\r\n\r\n", (400,)),
    Bytes("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (404, 400)),
    Bytes("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n", (400,)),
    Bytes("no Host", b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    Bytes("two Hosts", get("/health", "Host: localhost"), (400,)),
    Bytes("HTTP/1.0", get("/health", version="1.0"), (200,)),
    Bytes("HTTP/1.0 without a Host", b"GET /health HTTP/1.0\r\n\r\n", (200,)),
    Bytes("a header of a megabyte", get("/health", "x: " + "y" * 2**20), (400,)),
    Bytes("many headers", get("/health", *MANY), (400,)),
    Bytes("a target of a megabyte", get("/" + "y" * 2**20), (400,)),
    Bytes("length and encoding", post(CHAT, b"0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"), (400,),
          "invalid_http"),
    Bytes("length and encoding, then a smuggled request",
          post(CHAT, b"0\r\n\r\n" + get("/health"), "Content-Length: 5", "Transfer-Encoding: chunked"), (400,),
          "invalid_http"),
    Bytes("two lengths", post(CHAT, b"{}", "Content-Length: 2", "Content-Length: 3"), (400,)),
    Bytes("a negative length", post(CHAT, b"{}", "Content-Length: -2"), (400,)),
    Bytes("a length of 5,000 digits", post(CHAT, b"{}", "Content-Length: " + "9" * 5000), (400,)),
    Bytes("an unknown encoding", post(CHAT, b"{}", "Transfer-Encoding: gzip"), (400,)),
    Bytes("a chunk that is none", post(CHAT, b"zz\r\n", "Transfer-Encoding: chunked"), ()),
    Bytes("a body of 50 MB", post(CHAT, bytes(50_000_000)), (413,), "request_too_large"),
    Bytes("a body of 50 MB, and close", post(CHAT, bytes(50_000_000), CLOSE), (413,), "request_too_large"),
    Bytes("a body of 20 MB in one chunk",
          post(CHAT, b"%x\r\n" % 20_000_000 + bytes(20_000_000), "Transfer-Encoding: chunked"), (413,),
          "request_too_large"),
    Bytes("a body that was not asked for", post("/health", bytes(200_000), CLOSE), (405,)),
    Bytes("100-continue, then nothing", post(CHAT, b"", "Expect: 100-continue", "Content-Length: 50000000"), (413,),
          "request_too_large"),
    Bytes("100-continue", post("/v1/completions", SMALL, "Expect: 100-continue", CLOSE), (100, 200)),
    Bytes("an upgrade to a web socket", get("/health", "Upgrade: websocket", "Connection: upgrade, close"), (200,)),
    Bytes("ten pipelined, then garbage", get("/health") * 10 + b"\x00\r\n\r\n", (*[200] * 10, 400)),
    Bytes("a hundred pipelined", get("/health") * 99 + get("/health", CLOSE), (200,) * 100),
]  # fmt: skip


ENDLESS = ("only line ends", "a header of a megabyte", "many headers", "a target of a megabyte")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_no_request_is_refused_so_that_the_client_can_read_it(server: Target, case: Bytes) -> None:
    try:
        answer = server.raw(case.sent)
    except ConnectionError:  # it closed while headers without end were still being sent
        assert case.name in ENDLESS
        return
    assert tuple(int(each[:3]) for each in answer.split(b"HTTP/1.1 ")[1:]) == case.statuses, answer[:500]
    if case.code is not None:
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"] == case.code


def test_garbage_after_an_answer_ends_the_connection(server: Target) -> None:
    with server.connect() as client:
        client.sendall(post("/health", b"", "Transfer-Encoding: chunked"))
        while not (answer := client.recv(65536)).endswith(b"}"):
            assert answer
        client.sendall(b"zz\r\n")
        assert gone(client)


def test_more_idle_connections_than_descriptors(server: Target) -> None:
    with ExitStack() as opened:
        idle = [opened.enter_context(server.connect()) for _ in range(2 * FILES)]
        with server.http() as http:
            assert [http.get(path).status_code for path in ("/health", "/metrics", "/")] == [200] * 3
        server.assert_serving()
        assert gone(idle[0])
        assert not readable(idle[-1])  # the last to come stay
    server.assert_serving()
    assert server.log().count("connection limit reached") == 1


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="sets the limit of another process")
def test_a_server_without_descriptors_waits_until_there_are_some(server: Target) -> None:
    few = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        with ExitStack() as opened:
            for _ in range(50):  # they wait in the system's queue
                opened.enter_context(server.connect()).sendall(get("/health"))
            time.sleep(3)  # it tries again every second
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
    server.assert_serving()
    assert server.log().count("no connection can be accepted") == 1


def test_slow_headers_and_slow_bodies_hold_up_nobody(server: Target) -> None:
    with ExitStack() as opened:
        slow = [opened.enter_context(server.connect()) for _ in range(100)]
        for i, client in enumerate(slow):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: " if i % 2 else post(CHAT, b"{", "Content-Length: 100"))
        for _ in range(3):
            for client in slow:
                client.sendall(b" ")
            server.assert_serving()
        assert not any(map(readable, slow))


def test_clients_that_never_read_hold_up_nobody(server: Target) -> None:
    unknown = {f"{i:0200}": 0 for i in range(1000)}  # the answer names them: few tokens, yet more than buffers hold
    request = post("/v1/completions", SMALL | unknown | {"stream": True})
    with ExitStack() as opened:
        for _ in range(50):
            opened.enter_context(server.connect(receive_buffer=2048)).sendall(request)
        server.assert_serving()
    wait_until(lambda: idle(server))


def test_a_half_close_cancels(server: Target) -> None:
    with server.connect() as client:
        client.sendall(post(CHAT, LONG | {"stream": True}))
        client.recv(1)
        before = cancelled(server)
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: cancelled(server) == before + 1)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert b"[DONE]" not in answer
    wait_until(lambda: idle(server))


# Servers in this process, with limits that suit a test.


def test_where_no_connection_can_be_accepted_it_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[float] = []

    def accept(_: socket.socket) -> None:
        attempts.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with running() as server:
        with monkeypatch.context() as patch, connect(server.url):
            patch.setattr(socket.socket, "accept", accept)
            with connect(server.url):
                wait_until(lambda: len(attempts) >= 3)
        assert len(attempts) < 3 * (2 + attempts[-1] - attempts[0])  # it tries again every second
        with server.http() as http:
            assert http.get("/health").status_code == 200


def test_headers_must_come_in_time() -> None:
    with running(limits=Limits(idle_seconds=0.5)) as server:
        with connect(server.url) as silent:
            assert gone(silent)
        with connect(server.url) as slow:
            slow.sendall(get("/health") + b"GET /hea")
            answer = slow.recv(65536)
            while not readable(slow):
                slow.sendall(b"x")  # that more comes does not count
                time.sleep(0.05)
            answer += b"".join(iter(lambda: slow.recv(65536), b""))
            assert answer.count(b"HTTP/1.1 200") == 1


def test_beyond_the_limit_only_health_checks_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    async def reply(*_: object) -> Response:
        while not released.is_set():
            await asyncio.sleep(0.01)
        return Response()

    monkeypatch.setattr(RequestHandler, "reply", reply)
    with running(limits=Limits(connections=4)) as server, server.http() as http, ExitStack() as opened:
        for _ in range(2):  # at work, so that they cannot give way
            opened.enter_context(connect(server.url)).sendall(post(CHAT, LONG))
        wait_until(lambda: len(server.server.server_state.tasks) == 2)
        assert [http.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]
        refusal = http.get("/v1/models")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "too_many_connections")
        released.set()
        wait_until(lambda: not server.server.server_state.tasks)
        assert http.get("/v1/models").status_code == 200


@dataclass(eq=False)
class Member:
    address: str
    waits: bool = True
    dropped: bool = False
    idle_since: float = field(default_factory=time.perf_counter)

    def drop(self) -> None:
        self.dropped = True


def test_a_new_connection_takes_the_place_of_the_longest_idle_one() -> None:
    pool = Pool(Limits(connections=6))  # 3 of one client
    crowd, other = [Member("a") for _ in range(3)], [Member("b") for _ in range(2)]
    assert all(map(pool.add, [*crowd, *other]))
    crowd[0].waits = False
    assert pool.add(Member("a"))  # its client has three: the longest idle of them goes
    assert [each.dropped for each in crowd] == [False, True, False]
    assert pool.add(Member("c"))
    assert pool.add(Member("d"))  # all six are taken: the longest idle of all goes
    assert [each.dropped for each in crowd + other] == [False, True, True, False, False]
    pool.connections.discard(crowd[1])  # type: ignore[arg-type]  # when its end is reported
    assert pool.add(Member("e"))


def test_where_all_are_at_work_new_connections_are_for_health_checks_and_few() -> None:
    pool = Pool(Limits(connections=6))
    assert all(pool.add(Member(str(i), waits=False)) for i in range(6))
    more = [Member(str(i), waits=False) for i in range(6, 30)]
    assert not any(map(pool.add, more))
    assert [each.dropped for each in more] == [False] * 16 + [True] * 8


def test_connections_are_bounded_by_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((resource.RLIM_INFINITY, 2048), (65536, 2048), (1024, 896), (256, 128), (64, 16)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connection_limit() == most
    assert connection_limit(16) == 16
    with pytest.raises(RequestError, match="ulimit -n"):
        connection_limit(17)


def readable(client: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(client, selectors.EVENT_READ)
        return bool(selector.select(0))


def gone(client: socket.socket) -> bool:
    """Whether the server closes the connection without another byte. Waits for it."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def idle(server: Target) -> bool:
    with server.http() as http:
        state = http.get("/health").json()
    return bool(state["running"] + state["prefilling"] + state["queued"] == 0)


def cancelled(server: Target) -> float:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    wanted = 'endpoint="/v1/chat/completions",model="tiny-qwen3.5",outcome="cancelled"'
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"headstart_requests_total{{{wanted}}}")
    )
