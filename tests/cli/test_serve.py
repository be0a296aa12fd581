"""`headstart serve` as a user starts it: what it prints, what it refuses, and how it stops."""

import os
import re
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from typer.testing import CliRunner

import headstart
from headstart.cli.main import app
from headstart.cli.show import chat_tokens
from headstart.server import Server

KEY, PROMPT = "sk-never-to-be-seen", "Write a function that adds two secret-looking numbers."


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Start a server on a free port. Yield it and the lines that it printed, by name."""
    command = [Path(sysconfig.get_path("scripts")) / "headstart", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        yield process, {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    finally:
        process.kill()
        process.communicate()


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_more_connections_than_open_files_are_refused() -> None:
    assert "max_connections is 100000000" in refused("--max-connections", "100000000")


def test_images_need_a_model_that_sees() -> None:
    assert "--images: this model cannot see: config.json has no vision_config" in refused("--images", "--port", "0")


def test_it_says_where_it_is_and_answers_like_the_library() -> None:
    loaded, tokenizer = headstart.load()
    tokens = chat_tokens(tokenizer, [{"role": "user", "content": PROMPT}])
    expected = headstart.generate(loaded, tokenizer, tokens, max_tokens=24)
    with serving(HEADSTART_API_KEY=f"{KEY} another") as (process, printed):
        assert printed["Model"] == "tiny-qwen3.5"
        assert re.fullmatch(r"on, up to \d drafts per step", printed["Speculation"])
        address = printed["Address"]
        with httpx.Client() as http:
            assert http.get(f"{address}/models").status_code == 401
            assert http.post(f"{address}/chat/completions", json={"messages": 5}).status_code == 401
        for key in (KEY, "another"):
            client = OpenAI(base_url=address, api_key=key)
            assert client.models.list().data[0].id == "tiny-qwen3.5"
        answer: Any = client.chat.completions.create(
            model="tiny-qwen3.5", messages=[{"role": "user", "content": PROMPT}], max_tokens=24, temperature=0
        )
        assert answer.choices[0].message.content == expected

        curl = subprocess.run(
            ["bash", "-c", printed["Try"].replace("-d ", "-s -d ", 1)],
            capture_output=True, text=True, check=True, env=os.environ | {"HEADSTART_API_KEY": f"{KEY} another"},
        )  # fmt: skip
        assert '"finish_reason"' in curl.stdout

        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    seen = "".join(printed.values()) + output + errors
    assert KEY not in seen
    assert "secret-looking" not in seen
    assert "Traceback" not in seen


def test_a_stop_in_mid_stream_lets_the_answer_end() -> None:
    with serving("--model-id", "mine", "--no-mtp", "--shutdown-timeout", "600") as (process, printed):
        assert printed["Model"] == "mine"
        assert printed["Speculation"] == "off: loaded without the head"
        client = OpenAI(base_url=printed["Address"], api_key="none")
        create: Any = client.chat.completions.create
        stream = create(
            model="mine", messages=[{"role": "user", "content": PROMPT}], max_tokens=150, stream=True,
            extra_body={"min_tokens": 150},
        )  # fmt: skip
        first = [next(stream) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        chunks = first + list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.wait(300) == -signal.SIGTERM
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_client_that_calls_once_the_address_is_printed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Server, sockets: list[socket.socket]) -> None:
        socket.create_connection(sockets[0].getsockname()).close()

    monkeypatch.setattr(Server, "run", call)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--no-mtp"])
    assert result.exit_code == 0, result.stderr
    assert "Address:" in result.stdout


def test_it_refuses_to_be_seen_from_outside_without_a_key() -> None:
    assert "--api-key" in refused("--host", "0.0.0.0")


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused("--port", str(port))


def test_a_model_that_is_not_there_is_one_line() -> None:
    assert "no such folder" in refused("not-a-model", "--port", "0")


@pytest.mark.parametrize("key", ["", " padded", "ümlaut"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    assert "api_key" in refused("--api-key", key)
