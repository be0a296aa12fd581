"""A real server process under attack, and a bystander whose small request must complete all the same."""

import os
import signal
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SMALL = {"prompt": "def add(a, b):", "max_tokens": 1, "temperature": 0}


@dataclass(frozen=True)
class Case:
    """A hostile request and the refusal it must get. Adding one is a line in a table."""

    name: str
    path: str
    body: Any  # sent as JSON; bytes are sent as they are
    status: int
    code: str | None
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, http: httpx.Client) -> httpx.Response:
        headers = {"Content-Type": "application/json"} | self.headers
        if isinstance(self.body, bytes):
            return http.post(self.path, content=self.body, headers=headers)
        return http.post(self.path, json=self.body, headers=headers)


@dataclass
class Target:
    """A `headstart serve` process of its own: if it crashes, the tests do not."""

    process: subprocess.Popen[str]
    url: str
    errors: Path  # its standard error

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "timeout": 120} | options)

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        return connect(self.url, receive_buffer=receive_buffer)

    def raw(self, data: bytes) -> bytes:
        """Send bytes, and return what comes until the server closes."""
        with self.connect() as client:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(65536), b""))

    def small(self) -> str:
        """Return the answer to a small request."""
        with self.http() as http:
            response = http.post("/v1/completions", json=SMALL)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def check(self, case: Case) -> None:
        """Send a hostile request: it must get its refusal, and the server must live and serve."""
        with self.http() as http:
            response = case.send(http)
        assert (response.status_code, error_code(response)) == (case.status, case.code), response.text[:500]
        self.assert_serving()

    def assert_serving(self) -> None:
        assert self.process.poll() is None, f"the server died with {self.process.returncode}: {self.log()[-2000:]}"
        assert self.small()

    def log(self) -> str:
        return self.errors.read_text(encoding="utf-8", errors="replace")


def connect(url: str, *, receive_buffer: int | None = None) -> socket.socket:
    """Open a connection for bytes that no HTTP client would send."""
    client = socket.socket()
    client.settimeout(120)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    host, port = url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    return client


def error_code(response: httpx.Response) -> str | None:
    """Return the code of an OpenAI-shaped error, None for Anthropic's, which has none."""
    error = response.json()["error"]
    return error.get("code") if isinstance(error, dict) else None


@contextmanager
def target(
    *arguments: str, model: str = "tiny-qwen3.5", preexec: Callable[[], None] | None = None, **environment: str
) -> Iterator[Target]:
    """Start `headstart serve` on a free port and wait until it listens."""
    command = [Path(sysconfig.get_path("scripts")) / "headstart", "serve", model, "--port", "0", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"XDG_CONFIG_HOME": folder} | environment,
                preexec_fn=preexec,
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(5)]
            told = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            assert "Address" in told, errors.read_text()
            yield Target(process, told["Address"].removesuffix("/v1"), errors)
        finally:
            with suppress(ProcessLookupError):  # it may have died of the attack
                os.killpg(process.pid, signal.SIGKILL)  # with its workers, whatever state they are in
            process.communicate()
