"""A server whose device is lost to its process: it says so, ends, and starts anew unless it is told not to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.cli.serve import RESTARTED, _restarted

TESTS = Path(__file__).parents[1]
BODY: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 24, "min_tokens": 24, "temperature": 0}


@contextmanager
def losing_device(how: str, *flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(TESTS / "cli/losing_device.py"), how, "serve", "--port", "0", *flags]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    """The next address that it prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Address:"):
            return line.split()[1]
    raise AssertionError("it has ended")


def test_it_starts_anew_at_the_same_address_in_the_same_process() -> None:
    with losing_device("once") as process, httpx.Client(timeout=300) as http:
        first = address(process)
        lost = http.post(f"{first}/completions", json=BODY)
        assert lost.status_code == 503
        assert "driver ignores this process" in lost.json()["error"]["message"]
        assert address(process) == first
        assert http.post(f"{first}/completions", json=BODY).status_code == 200
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "starting anew: the GPU's driver ignores this process" in said


@pytest.mark.slow
def test_it_ends_where_it_may_not_start_anew_or_did_so_a_moment_ago() -> None:
    for flags, environment, why in (
        (["--no-restart"], {}, "start it again"),
        ([], {RESTARTED: str(time.time())}, "started anew less than 60 s ago"),
    ):
        with losing_device("always", *flags, **environment) as process, httpx.Client(timeout=300) as http:
            assert http.post(f"{address(process)}/completions", json=BODY).status_code == 503
            _, said = process.communicate(timeout=300)
        assert process.returncode == 1
        *_, last = said.strip().splitlines()
        assert last.startswith("error: the GPU's driver ignores this process")
        assert why in last


def test_a_variable_that_holds_no_time_is_not_taken_for_a_process_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTARTED, "x")
    assert _restarted() is None
    monkeypatch.setenv(RESTARTED, f"{time.time()} lost")
    assert "lost" in str(_restarted())
