"""Server processes for the suites."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

MODEL = "tiny-qwen3.5"
START_SECONDS = 180.0  # kernels may have to be compiled
OPENER = build_opener(ProxyHandler({}))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask(
    url: str, body: Mapping[str, Any] | None = None, timeout: float = 120, headers: Mapping[str, str] | None = None
) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    known = {"Content-Type": "application/json"}
    with OPENER.open(Request(url, data, known | dict(headers or {})), timeout=timeout) as response:
        text = response.read()
    return json.loads(text) if text else None


class Broken(Exception):
    """A stream ended before its answer."""


def read_stream(url: str, body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text and the statistics of a streamed chat."""
    data = json.dumps({**body, "stream": True}).encode()
    text, stats = "", None
    try:
        with OPENER.open(Request(url, data, {"Content-Type": "application/json"}), timeout=120) as response:
            for line in response:
                chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                text += "".join(each["delta"].get("content") or "" for each in chunk.get("choices", ()))
                stats = chunk.get("generation_stats", stats)
    except (HTTPException, OSError) as error:
        if isinstance(error, HTTPError):
            raise
        raise Broken(str(error)) from error
    if stats is None:
        raise Broken("it has no end")
    return text, stats


@dataclass
class Process:
    url: str
    process: "subprocess.Popen[bytes]"

    def wait(self, path: str) -> None:
        """Wait until a path answers."""
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                ask(self.url + path, timeout=5)
                return
            except (URLError, OSError, ValueError) as error:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{self.process.args!r} does not answer: {error}") from error
            time.sleep(0.2)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def running(command: list[str], port: int, path: str = "/health") -> Iterator[Process]:
    """Run a command that listens on a port, until the block ends."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    server = Process(f"http://127.0.0.1:{port}", process)
    try:
        server.wait(path)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def headstart(*options: str) -> Iterator[Process]:
    port = free_port()
    with running([sys.executable, "-m", "headstart", "serve", "--port", str(port), *options], port) as server:
        yield server
