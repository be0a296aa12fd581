"""`python bench/load.py`: stub servers, every output, and what is refused before anything is measured."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.load import main
from stub_server import Schedule, Stub

QUICK = Schedule([(0.001, 1), (0.001, 3), (0.001, 4)], usage={"prompt_tokens": 9})
LIGHT = ["--prompts", "short", "--requests", "2", "--repeats", "2", "--concurrency", "1,2"]


class Result(NamedTuple):
    status: int
    stdout: str
    stderr: str


def load(*arguments: object) -> Result:
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        try:
            status = main(list(map(str, arguments)))
        except SystemExit as stopped:  # of argparse
            status = int(stopped.code or 0)
    return Result(status, stdout.getvalue(), stderr.getvalue())


def refused(*arguments: object) -> str:
    result = load(*arguments)
    assert result.status == 1, result
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    return last


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """Run the stub in a thread of its own, on the clock of this machine."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(stub.__aenter__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_servers_are_compared_and_shown_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    stubs = [Stub(lambda body, busy: QUICK, key="sesame") for _ in range(2)]
    with serving(stubs[0]) as one, serving(stubs[1]) as two:
        result = load(
            "--url", f"plain={one}#num_draft_tokens=0", "--url", f"other={two}", *LIGHT,
            "--api-key", "sesame", "--api-key", "sesame", "--output", file,
        )  # fmt: skip
    assert result.status == 0, result
    assert result.stdout.startswith("# Benchmark: plain, other\n")
    assert "## Latency" in result.stdout
    assert "Measuring plain, other on short prompts, 1 at a time, 2 at a time: 12 runs" in result.stderr
    measurements = json.loads(file.read_text())["measurements"]
    assert [(each["variant"], each["condition"]["value"]) for each in measurements] == [
        ("plain", 1), ("other", 1), ("plain", 2), ("other", 2),
    ]  # fmt: skip
    assert {each["completion_tokens"] for each in measurements} == {8.0}
    assert measurements[1]["relative"].keys() == {"tokens_per_second", "ttft", "itl", "e2e"}
    assert all(body["num_draft_tokens"] == 0 for _, _, body in stubs[0].asked)
    assert all("num_draft_tokens" not in body for _, _, body in stubs[1].asked)
    assert "sesame" not in str(result) + file.read_text()


@pytest.mark.parametrize(
    ("keys", "second"),
    [([], None), (["--api-key", "sesame"], None), (["--api-key", "sesame", "--api-key", "b"], "b")],
)
def test_a_key_goes_to_the_server_that_it_is_for(
    keys: list[str], second: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key in the environment is for the first server, whatever its variants: others must not see it."""
    monkeypatch.setenv("HEADSTART_API_KEY", "" if keys else "sesame more")
    ours, theirs = Stub(lambda body, busy: QUICK, key="sesame"), Stub(lambda body, busy: QUICK, key=second)
    with serving(ours) as one, serving(theirs) as two:
        urls = [part for url in (one, f"{one}#num_draft_tokens=0", two) for part in ("--url", url)]
        result = load(*urls, *keys, *LIGHT)
    assert result.status == 0, result
    assert (ours.keys, theirs.keys) == ({"sesame"}, {second})


def test_ctrl_c_keeps_what_servers_answered() -> None:
    number = iter(range(10**6))

    def answer(body: Any, busy: int) -> Schedule:
        if next(number) == 6:  # after one to check, two to warm up, and two that count
            os.kill(os.getpid(), signal.SIGINT)
        return QUICK

    with serving(Stub(answer)) as url:
        result = load("--url", url, "--prompts", "short", "--concurrency", 1, "--requests", 2)
    assert result.status == 130, result
    assert "**Not complete: interrupted**" in result.stdout


def test_a_server_completes_ones_own_prompts_at_a_rate(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Once upon a time\nIt was late\n")
    stub = Stub(lambda body, busy: Schedule(QUICK.pieces, usage=None, chat=False), models=["a", "b"])
    with serving(stub) as url:
        result = load(
            "--model", "b", "--url", url, "--completions", "--prompts", own, "--rate", "200", "--requests", 2,
            "--repeats", 1, "--json",
        )  # fmt: skip
    assert result.status == 0, result
    (found,) = json.loads(result.stdout)["measurements"]
    assert found["condition"] == {"prompts": "own", "load": "rate", "value": 200.0}
    assert found["counted"] == {"chunks": 2}
    assert {(path, body["prompt"], body["model"]) for _, path, body in stub.asked} == {
        ("/v1/completions", "Once upon a time", "b"),
        ("/v1/completions", "It was late", "b"),
    }


def test_what_was_measured_before_a_server_died_is_kept(tmp_path: Path) -> None:
    number = iter(range(10**6))
    broken: tuple[int, Any] = (500, {"error": {"message": "dead"}})
    with serving(Stub(lambda body, busy: QUICK if next(number) < 5 else broken)) as url:
        arguments = ["--prompts", "short", "--concurrency", 1, "--requests", 2, "--output", tmp_path / "load.md"]
        error = refused("--url", f"it={url}", *arguments)
    assert "not complete: it: no request succeeded (short, 1 at a time): answered 500: dead" in error
    assert "**Not complete: it: no request succeeded" in (tmp_path / "load.md").read_text()


def test_a_server_or_model_that_is_not_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
    assert f"{url}/v1: cannot be reached: is the server running?" in refused("--url", url)
    with serving(Stub(lambda body, busy: QUICK)) as url:
        assert "model other: answered 404: there is no model other" in refused("--model", "other", "--url", url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "nowhere/report.md"], "--output nowhere/report.md: cannot be written"),
        (["--prompts", "verse"], "--prompts verse: not one of code, prose"),
        (["--url", "http://a"], "two servers are called a: give --url NAME=URL"),
        (["--url", "a:8000"], "--url a:8000: not a URL"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = load("--url", "http://a", *arguments)
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "argument", ["--concurrency few", "--concurrency 1,0", "--rate often", "--rate 0", "--rate ", "--repeats 0"]
)
def test_a_load_that_is_no_number_above_0_is_refused(argument: str) -> None:
    flag, value = argument.split(" ")
    result = load("--url", "http://a", flag, value)
    assert (result.status, result.stdout) == (2, "")
    assert f"argument {flag}: invalid" in result.stderr
