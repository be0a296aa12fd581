"""`headstart ps` and `headstart stop`, at a real server."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from running import serving
from typer.testing import CliRunner, Result

from checkpoints import write
from headstart.cli.main import app
from headstart.engine import DeviceThread
from headstart.server.model_pool import ModelPool
from headstart.server.pooled_model import PooledModel


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_models_are_listed_and_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADSTART_API_KEY", raising=False)
    sizes = {"vocab_size": 8192, "max_position_embeddings": 2048}
    folders = [write(tmp_path / name, "dense", seed=seed, **sizes) for seed, name in enumerate(("red", "green"))]
    pool = ModelPool(DeviceThread(), [PooledModel.of(folder) for folder in folders])
    with serving(pool) as server, server.http() as http:
        port = ["--port", server.url.rpartition(":")[2]]
        assert http.post("/v1/models/load", json={"model": "red"}).status_code == 200

        def states() -> dict[str, str]:
            lines = run("ps", *port).stdout.splitlines()
            assert lines[0].split() == ["model", "state", "GB"]
            return {line.split()[0]: line.split()[1] for line in lines[1:]}

        assert states() == {"red": "loaded", "green": "unloaded"}
        given_back: list[bool] = []  # to the system, by the C library
        monkeypatch.setattr("headstart.server.model_pool.give_back_memory", lambda: given_back.append(True))
        assert run("stop", "red", *port).stdout.startswith("red: unloaded")
        assert given_back
        assert states() == {"red": "unloaded", "green": "unloaded"}
        unknown = run("stop", "blue", *port)
        assert unknown.exit_code == 1
        assert unknown.stderr.startswith("error: ")
        assert "blue" in unknown.stderr


def test_another_programs_server_is_told_apart() -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "x"}]}')

        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        for command in (["ps"], ["stop", "red"]):
            result = run(*command, "--port", str(other.server_port))
            assert (result.exit_code, result.stdout) == (1, "")
            assert "no Headstart server answers on port" in result.stderr
        other.shutdown()


def test_without_a_server_it_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for command in (["ps"], ["stop", "red"]):
        result = run(*command, "--port", str(port))
        assert (result.exit_code, result.stdout) == (1, "")
        assert f"no Headstart server answers on port {port}" in result.stderr
        assert "`headstart serve`" in result.stderr
