"""`headstart` under `mlx.launch`, as a user starts it on several machines."""

import json
import os
import re
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from checkpoints import write
from headstart.cli import machines
from headstart.cli.main import app

SCRIPTS = Path(sysconfig.get_path("scripts"))
QUESTION = ("--prompt", "Write a function that adds two numbers.", "--max-tokens", "12", "--json")
ENVIRONMENT = os.environ | {"MLX_DISABLE_COMPILE": "1"}  # the same bits, without a compiler run in every process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Small, with a vocabulary as large as its tokenizer's."""
    sizes = {"vocab_size": 8192, "num_hidden_layers": 3, "full_attention_interval": 2}
    return str(write(tmp_path_factory.mktemp("model"), "dense", **sizes))


@pytest.mark.parametrize("hosts", [None, "", '[["127.0.0.1:1"], ["127.0.0.1:2"]]'])
@pytest.mark.parametrize("rank", [None, *machines.RANKS])
@pytest.mark.parametrize("size", [None, "1", "2"])
def test_a_process_is_one_of_several_if_it_has_a_rank_among_them(
    hosts: str | None, rank: str | None, size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLX_HOSTFILE", *machines.RANKS, *machines.RANKS.values()):
        monkeypatch.delenv(name, raising=False)
    if hosts is not None:
        (tmp_path / "hosts.json").write_text(hosts + "\n")
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "hosts.json"))
    if rank is not None:
        monkeypatch.setenv(rank, "0")
        if size is not None:
            monkeypatch.setenv(machines.RANKS[rank], size)
    assert machines.launched() == (rank is not None and hosts != "" and size != "1")


@pytest.mark.parametrize("command", ["chat", "demo", "bench", "probe", "convert"])
def test_a_command_for_one_machine_is_refused_on_several(command: str) -> None:
    result = CliRunner().invoke(app, [command], env={"MLX_RANK": "1"})
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {command} is for one machine, and mlx.launch has started it on several")


@contextmanager
def launched(*command: str) -> Iterator[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    launcher = [SCRIPTS / "mlx.launch", "-n", "2", "--backend", "ring", "--starting-port", str(port), "--"]
    process = subprocess.Popen(
        [*launcher, SCRIPTS / "headstart", *command],
        stdin=subprocess.PIPE,  # it hands its own input on to all, and spins where there is none
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow  # tests/cluster/test_answers.py has the ranks without the launcher
def test_two_machines_generate_what_one_does(folder: str) -> None:
    command = ("generate", *QUESTION, "--model", folder)
    alone = CliRunner().invoke(app, [*command])
    with launched(*command, "--split", "pipeline") as process:
        output, errors = process.communicate(timeout=300)
    answer = json.loads(output)  # of the first one only
    assert answer["tokens"] == json.loads(alone.stdout)["tokens"]
    assert answer["stats"]["ranks"] == 2
    assert "error" not in errors


@pytest.mark.slow
def test_a_refusal_ends_all_of_them() -> None:
    with launched("generate", "--prompt", "Hello", "--model", os.devnull) as process:
        output, errors = process.communicate(timeout=120)
    assert output == ""
    assert "error: " in errors


@pytest.mark.slow
def test_two_machines_serve_and_stop_when_one_is_lost(folder: str) -> None:
    with launched("serve", folder, "--port", "0") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        address = re.search(r"http://\S+:\d+", lines[1])
        assert address is not None
        with httpx.Client(base_url=address[0], timeout=60) as http:
            question = {"prompt": "def", "max_tokens": 12, "temperature": 0, "num_draft_tokens": 3}
            answer = http.post("/v1/completions", json=question).json()
            assert answer["generation_stats"]["ranks"] == 2
            metrics = http.get("/metrics").text
            assert f'headstart_ranks{{model="{Path(folder).name}"}} 2.0' in metrics
            question |= {"max_tokens": 2000, "stream": True}
            with http.stream("POST", "/v1/completions", json=question) as stream:
                lines = stream.iter_lines()
                next(lines)
                os.kill(rank_1(process.pid), signal.SIGKILL)
                assert any("rank 1 of 2 is gone" in line for line in lines)
        _, errors = process.communicate(timeout=120)
    assert "error: rank 1 of 2 is gone" in errors


def rank_1(launcher: int) -> int:
    """The launcher's second child."""
    children = Path(f"/proc/{launcher}/task").glob("*/children")
    return sorted(int(child) for each in children for child in each.read_text().split())[1]
