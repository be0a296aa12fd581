"""`headstart serve` as a user starts it: what it prints, what it refuses, and how it stops."""

import os
import re
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from typer.testing import CliRunner

import headstart
from adapters import write_adapter
from checkpoints import write
from headstart.checkpoint.template import chat_tokens
from headstart.cli import serve
from headstart.cli.main import app
from headstart.server.model_pool import ModelPool
from headstart.server.server import Server

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


def test_it_prints_its_address_and_answers_like_the_library() -> None:
    loaded, tokenizer = headstart.load()
    tokens = chat_tokens(tokenizer, [{"role": "user", "content": PROMPT}])
    expected = headstart.generate(loaded, tokenizer, tokens, max_tokens=24)
    with serving("--drain-seconds", "600", HEADSTART_API_KEY=f"{KEY} another") as (process, printed):
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


@pytest.mark.slow  # tests/server/test_hostile_signals.py has it with drafts
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


@pytest.mark.slow
def test_a_restarted_server_resumes_from_the_disk_and_answers_the_same(tmp_path: Path) -> None:
    """Also after kill -9, and beside a folder that it may not use."""
    answers = []
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("irreplaceable")
    for folder, stop in (("cache", signal.SIGTERM), ("cache", signal.SIGKILL), ("cache", None), ("foreign", None)):
        with serving("--prefix-cache-dir", str(tmp_path / folder)) as (process, printed):
            create: Any = OpenAI(base_url=printed["Address"], api_key="none").chat.completions.create
            message = {"role": "user", "content": PROMPT + " It must be correct." * 60}
            answers.append(create(model="tiny-qwen3.5", messages=[message], max_tokens=16, temperature=0))
            if stop is not None:
                process.send_signal(stop)
                assert process.wait(300) == -stop
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert cached[0] == cached[3] == 0
    assert cached[1] == cached[2] > 0.9 * answers[0].usage.prompt_tokens
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.txt"]


def test_a_client_that_calls_once_the_address_is_printed_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[int] = []

    def call(self: Server, announce: Callable[[], None]) -> None:
        announce()
        url = f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"
        answered.extend(httpx.get(f"{url}{path}").status_code for path in ("/health", "/health/live"))

    monkeypatch.setattr(Server, "wait", call)
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--no-mtp"])
    assert result.exit_code == 0, result.stderr
    assert "Address:" in result.stdout
    assert answered == [200, 200]


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


def test_several_models_are_served_and_the_first_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[ModelPool] = []
    monkeypatch.setattr(Server, "wait", lambda self, announce: announce())
    monkeypatch.setattr(serve, "_load", lambda server, state, pool, model: pools.append(pool))
    folders = [str(write(tmp_path / name, "dense")) for name in ("one", "two")]
    result = CliRunner().invoke(app, ["serve", *folders, "--pin", "tiny-qwen3.5", "--memory-gb", "1", "--port", "0"])
    assert result.exit_code == 0, result.stderr
    assert "Model:       one; when needed two, tiny-qwen3.5\n" in result.stdout
    assert [(model.id, model.pinned) for model in pools[0].models] == [
        ("one", False), ("two", False), ("tiny-qwen3.5", True),
    ]  # fmt: skip
    assert len(pools) == 2, "the first and the pinned one are loaded at the start"


def test_models_that_cannot_be_served_together_are_refused(tmp_path: Path) -> None:
    folders = [str(write(tmp_path / name, "dense")) for name in ("one", "two", "again/one")]
    said = refused(*folders[:2], "--memory-gb", "0.0001", "--port", "0")
    assert "model 'one' does not fit: its weights take 0.00 GB" in said
    assert "two are called one" in refused(folders[0], folders[2], "--port", "0")
    assert "--model-id is for one model" in refused(*folders[:2], "--model-id", "mine")
    assert "--images is for one model" in refused(*folders[:2], "--images")
    assert "--drafter is for one model" in refused(*folders[:2], "--drafter", folders[0])
    for flag in (["--images"], ["--head", folders[2]], ["--drafter", folders[2]], ["--model-id", "mine"]):
        assert f"{flag[0]} is for one model" in refused(folders[0], "--pin", folders[1], *flag)


def test_adapters_go_to_the_first_model_or_to_the_one_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[ModelPool] = []
    monkeypatch.setattr(Server, "wait", lambda self, announce: announce())
    monkeypatch.setattr(serve, "_load", lambda server, state, pool, model: pools.append(pool))
    one, two = (write(tmp_path / name, "dense") for name in ("one", "two"))
    tune = write_adapter(tmp_path / "tune", one)
    config = tmp_path / "serve.toml"
    config.write_text(
        f'models = ["{one}", "{two}"]\nport = 0\nadapter = ["a={tune}", "{two}:b={tune}", "c={tune}"]\n'
    )
    result = CliRunner().invoke(app, ["serve", "--config", str(config)])
    assert result.exit_code == 0, result.stderr
    assert [[adapter.name for adapter in model.adapters] for model in pools[0].models] == [["a", "c"], ["b"]]
    for given, said in (
        ("tune", "--adapter tune: write NAME=PATH"),
        ("=there", "--adapter =there: write NAME=PATH"),
        ("a b=there", "a name begins with a letter or digit"),
        (f"three:a={tune}", "three is not one of the models"),
        (f"a={tmp_path / 'none'}", "adapter_config.json is missing"),
    ):
        assert said in refused(str(one), "--adapter", given, "--port", "0")
    assert "there is another a" in refused(str(one), "--adapter", f"a={tune}", "--adapter", f"{one}:a={tune}")
