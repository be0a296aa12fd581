"""Signals and broken standard streams, against a real server process."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hostile import Target, target
from running import wait_until

from headstart.server.listen import bind, listen

LONG: dict[str, Any] = {"max_tokens": 3000, "min_tokens": 3000, "temperature": 0, "stream": True}
SHORT: dict[str, Any] = {"max_tokens": 40, "min_tokens": 40, "temperature": 0, "stream": True}
PROMPTS = ("def add(a, b):", "import json\n")


@contextmanager
def streaming(server: Target, **body: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream, the first of which has come."""
    with server.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line and not line.startswith(":"))
        assert next(lines).startswith("data: ")
        yield lines


def answer(server: Target, prompt: str, **body: Any) -> str:
    """All of a stream but its id and times."""
    with server.http() as http:
        text = http.post("/v1/completions", json={"prompt": prompt} | body).text
    chunks = [each.removeprefix("data: ") for each in text.split("\n\n") if each.startswith("data: ")]
    assert chunks[-1] == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])


def stopping(server: Target) -> bool:
    """It has closed the place where it listened."""
    try:
        server.connect().close()
    except OSError:
        return True
    return False


def assert_sigterm_lets_streams_end(server: Target) -> None:
    bodies = [SHORT | {"prompt": prompt} for prompt in PROMPTS]
    with streaming(server, **bodies[0]) as one, streaming(server, **bodies[1]) as two:
        server.process.send_signal(signal.SIGTERM)
        for lines in (one, two):
            *_, last, done = lines
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert done == "data: [DONE]"
    assert server.process.wait(300) == -signal.SIGTERM


@pytest.mark.slow  # the server without standard streams ends in this way, too
def test_sigterm_lets_streams_end_that_run() -> None:
    with target("--shutdown-timeout", "600", "--drain-seconds", "0") as server:
        assert_sigterm_lets_streams_end(server)
        assert "Traceback" not in server.log()


def test_a_second_sigint_does_not_wait_for_streams() -> None:
    with target("--shutdown-timeout", "600", "--no-mtp") as server, streaming(server, prompt="a", **LONG) as lines:
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: stopping(server), 300)
        assert next(lines).startswith("data: ")  # it goes on
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert any('"shutting_down"' in line for line in lines)
        assert server.process.wait(300) == 0
        assert "Traceback" not in server.log()


def test_a_server_that_was_stopped_for_seconds_goes_on_where_it_was(attacked: Target) -> None:
    logged = len(attacked.log())
    expected = [answer(attacked, prompt, **SHORT) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool, streaming(attacked, prompt="a", **LONG) as lines:
        running = [pool.submit(answer, attacked, prompt, **SHORT) for prompt in PROMPTS]
        attacked.process.send_signal(signal.SIGSTOP)
        waiting = pool.submit(attacked.small)  # sent to a process that does not run
        time.sleep(6)  # longer than a connection is kept alive
        assert not waiting.done()
        attacked.process.send_signal(signal.SIGCONT)
        assert [each.result() for each in running] == expected
        assert waiting.result()
        assert next(lines).startswith("data: ")
    attacked.assert_serving()
    assert "Traceback" not in attacked.log()[logged:]


@pytest.mark.slow
def test_requests_whose_time_passed_while_the_server_was_stopped_end_and_others_do_not() -> None:
    with target("--timeout", "30") as server:
        with ThreadPoolExecutor(1) as pool, streaming(server, prompt="a", **LONG) as lines:
            server.process.send_signal(signal.SIGSTOP)
            waiting = pool.submit(server.small)
            time.sleep(31)
            server.process.send_signal(signal.SIGCONT)
            assert any('"timeout"' in line for line in lines)
            assert waiting.result()  # it was not read before: its time begins now
        server.assert_serving()


def test_a_port_can_be_bound_though_connections_to_it_linger() -> None:
    """The system keeps a connection that the server's end closed first."""
    with bind("127.0.0.1", 0) as place:
        listen(place)
        address = place.getsockname()
        with socket.create_connection(address) as client:
            place.accept()[0].close()
            assert client.recv(1) == b""
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(address)
    bind(*address).close()


@pytest.mark.slow
def test_a_server_that_was_killed_can_be_started_on_its_port_at_once() -> None:
    with target() as first, streaming(first, prompt="a", **LONG):
        port = first.url.rsplit(":", 1)[1]
        first.process.kill()
        first.process.wait(60)
        with target("--port", port) as second:
            assert second.url == first.url
            second.assert_serving()


@contextmanager
def started(**streams: Any) -> Iterator[Target]:
    """A server that cannot print its address, since its output is closed."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    command = [Path(sysconfig.get_path("scripts")) / "headstart", "serve", "--port", str(port), "--access-log"]
    command += ["--shutdown-timeout", "600", "--drain-seconds", "0", "--no-mtp"]
    process = subprocess.Popen(command, text=True, start_new_session=True, **streams)
    server = Target(process, f"http://127.0.0.1:{port}", Path(os.devnull))
    try:
        wait_until(lambda: process.poll() is not None or not stopping(server), 300)
        assert process.poll() is None
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def log_a_lot(server: Target, size: int) -> None:
    """Fill more than a pipe of that size holds."""
    with server.http() as http:
        for _ in range(size // 160):  # a line holds 200 characters of a path
            assert http.get("/" + "x" * 200).status_code == 404


def test_a_server_whose_standard_streams_are_closed_serves_and_sigterm_lets_its_streams_end() -> None:
    with started(preexec_fn=lambda: os.closerange(0, 3)) as server:
        server.assert_serving()
        assert_sigterm_lets_streams_end(server)


def test_a_server_whose_log_is_not_read_serves() -> None:
    """Its pipe is full first, and then closed at the other end."""
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) if hasattr(fcntl, "F_SETPIPE_SZ") else 65536
    with started(stdout=writing, stderr=writing) as server:
        os.close(writing)
        log_a_lot(server, size)
        server.assert_serving()
        os.close(reading)
        server.assert_serving()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(300) == -signal.SIGTERM
