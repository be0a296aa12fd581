"""The states of a `headstart serve` process: what it answers before its slow imports, and when it stops."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_serve import serving

SLOW_IMPORTS = Path(__file__).with_name("importing_slowly.py")
BODY: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 3, "temperature": 0}


@contextmanager
def starting() -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server that has answered, and imports nothing slow before a line comes on its standard input."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(SLOW_IMPORTS), "serve", "--port", str(port), "--no-mtp"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, text=True, env=os.environ, **pipes)
    transport = httpx.HTTPTransport(retries=9)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300, transport=transport) as http:
            told = http.get("/health")
            assert (told.status_code, told.json()["status"]) == (503, "starting")
            assert told.json()["reason"] == "importing libraries"
            yield process, http
    finally:
        process.kill()
        process.communicate()


def test_the_port_answers_before_anything_slow_is_imported() -> None:
    with starting() as (process, http), ThreadPoolExecutor(1) as clients:
        assert http.get("/health/live").status_code == 200
        (model,) = http.get("/v1/models").json()["data"]
        assert (model["id"], model["state"]) == ("tiny-qwen3.5", "loading")
        waiting = clients.submit(http.post, "/v1/completions", json=BODY)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert any(line.startswith("Address:") for line in process.stdout)
        assert waiting.result().status_code == 200
        assert http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_ends_a_server_that_starts(number: signal.Signals, status: int) -> None:
    with starting() as (process, _):
        process.send_signal(number)
        assert process.wait(300) == status
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_after_sigterm_it_is_not_ready_and_answers_until_the_second_signal() -> None:
    with serving("--no-mtp", "--drain-seconds", "600") as (process, printed), httpx.Client(timeout=300) as http:
        url = printed["Address"].removesuffix("/v1")
        process.send_signal(signal.SIGTERM)
        while (told := http.get(f"{url}/health")).status_code == 200:
            pass
        assert (told.status_code, told.json()["status"]) == (503, "draining")
        assert http.get(f"{url}/health/live").status_code == 200
        assert http.post(f"{url}/v1/completions", json=BODY).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == -signal.SIGTERM
