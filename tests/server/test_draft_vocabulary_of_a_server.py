"""`headstart draft-vocabulary --server`: the list holds what a server has generated."""

import json
from pathlib import Path

from running import Running, running
from typer.testing import CliRunner

from checkpoints import write
from headstart.cli.main import app


def chosen(model: Path, address: str, *more: str) -> str:
    result = CliRunner().invoke(app, ["draft-vocabulary", str(model), "--size", "8", "--server", address, *more])
    return " ".join(result.output.split())


def generate(server: Running, token: int) -> None:
    bias = {str(token): 100}
    with server.http() as http:
        http.post("/v1/completions", json={"prompt": [7], "max_tokens": 9, "logit_bias": bias}).raise_for_status()


def test_a_list_holds_what_a_server_has_generated(tmp_path: Path) -> None:
    model = write(tmp_path / "tiny", "dense", vocab_size=8192)
    with running(key="secret") as server:
        assert "401" in chosen(model, server.url)
        assert not (model / "draft_vocabulary.json").exists()
    with running() as server:
        assert "has not generated anything yet" in chosen(model, f"{server.url}/v1")
        generate(server, 4321)
        assert "8 of 8192 tokens, frequencies of 9 tokens" in chosen(model, f"{server.url}/v1/")
        assert json.loads((model / "draft_vocabulary.json").read_text())["ids"] == [*range(7), 4321]
        small = write(tmp_path / "small", "dense", vocab_size=64)
        assert "serves a model with more tokens" in chosen(small, server.url)
    assert "Give the address of a Headstart server" in chosen(model, "http://127.0.0.1:9")
