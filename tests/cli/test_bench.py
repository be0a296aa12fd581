"""`headstart bench`: real depths and stub servers, every output, and what is refused before anything is measured."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headstart.bench import local
from headstart.bench.local import decode_batch
from headstart.bench.plan import Trial
from headstart.cli import progress
from headstart.cli.main import app
from stub_server import Schedule, Stub

SMALL = ["--batch-size", "1", "--tokens", "20", "--repeats", "2", "--prompts", "code"]
QUICK = Schedule([(0.001, 1), (0.001, 3), (0.001, 4)], usage={"prompt_tokens": 9})
LIGHT = ["--prompts", "short", "--requests", "2", "--repeats", "2", "--concurrency", "1,2"]


def bench(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env=environment)


def refused(*arguments: object) -> str:
    result = bench(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
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


def test_depths_are_measured_and_shown_in_every_form(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    result = bench(*SMALL, "--k", "0,2,auto", "--json", "--output", page)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [each["variant"] for each in report["measurements"]] == ["k=0", "k=2", "k=auto"]
    assert all(each["identical"] for each in report["measurements"])
    assert (report["exact"], report["stopped"]) == (True, None)
    assert "best_fixed" in report["measurements"][2]["relative"]
    assert page.read_text().startswith("# Benchmark: tiny-qwen3.5\n")
    assert str(Path.home()) not in result.stdout + page.read_text()


def test_the_plan_and_the_progress_come_first_where_nothing_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "decode_batch", lambda *asked: Trial(10, 1.0, 1.0, sequences=[[1]]))
    result = bench(*SMALL, "--k", "0,1")
    first, second, third, *lines = result.stderr.splitlines()
    assert first == "No model given: measuring the small built-in one. Name a model to measure yours."
    assert second.startswith("Measuring tiny-qwen3.5: k=0, k=1 on code prompts, batch of 1: 6 runs of 20 tokens")
    assert re.fullmatch(r"0 of 6 runs: k=., code, batch of 1", third)
    assert re.fullmatch(r"1 of 6 runs, about \d+ s left: k=., code, batch of 1", lines[0])
    assert "No model given" not in bench("tiny-qwen3.5", *SMALL, "--k", "0").stderr


def test_progress_in_a_log_has_the_first_estimate_and_then_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 0.0, 2.0, 3.0, 6.0, 8.0])  # at the start, and before each of five runs
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.Progress(5, "runs") as shown:
        for name in ("one", "two", "three", "four", "five"):
            shown.begin(name)
    assert capsys.readouterr().err.splitlines() == [
        "0 of 5 runs: one",
        "1 of 5 runs, about 8 s left: two",
        "4 of 5 runs, about 2 s left: five",
    ]


@pytest.mark.slow
def test_own_prompts_are_measured_by_their_kinds(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"kind": "sums", "text": "1 + 1 = 2"}\n{"kind": "lists", "text": "a, b, c"}\n')
    result = bench("--prompts", own, "--batch-size", 1, "--tokens", 20, "--repeats", 1, "--k", 0, "--json")
    assert result.exit_code == 0, result.stderr
    assert [each["condition"]["prompts"] for each in json.loads(result.stdout)["measurements"]] == ["sums", "lists"]


def test_ctrl_c_reports_what_there_is_and_marks_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = iter([decode_batch] * 3)  # one warms up

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "decode_batch", lambda *asked: next(runs, interrupted)(*asked))
    result = bench(*SMALL, "--repeats", 3, "--k", "0", "--json", "--output", tmp_path / "report.json")
    assert result.exit_code == 130, result.output
    report = json.loads(result.stdout)
    assert (report["stopped"], report["measurements"][0]["repeats"]) == ("interrupted", 2)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    monkeypatch.setattr(local, "decode_batch", interrupted)
    result = bench(*SMALL, "--k", "0")
    assert (result.exit_code, result.stdout) == (130, "")


def test_other_tokens_than_plain_decoding_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "decode_batch", lambda model, prompts, k, tokens: Trial(9, 1.0, 1.0, sequences=[[k]]))
    result = bench(*SMALL, "--k", "0,1")
    assert "**Not the tokens of k=0:** k=1, code, batch of 1." in result.stdout
    assert result.exit_code == 1
    assert "error: the tokens are not those of plain decoding" in result.stderr


def test_servers_are_compared_and_shown_in_every_form(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    stubs = [Stub(lambda body, busy: QUICK, key="sesame") for _ in range(2)]
    with serving(stubs[0]) as one, serving(stubs[1]) as two:
        result = bench(
            "--url", f"plain={one}#num_draft_tokens=0", "--url", f"other={two}", *LIGHT,
            "--api-key", "sesame", "--api-key", "sesame", "--output", file,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("# Benchmark: plain, other\n")
    assert "## Latency" in result.stdout
    assert "Measuring plain, other: plain, other on short prompts, 1 at a time, 2 at a time: 12 runs" in result.stderr
    measurements = json.loads(file.read_text())["measurements"]
    assert [(each["variant"], each["condition"]["value"]) for each in measurements] == [
        ("plain", 1), ("other", 1), ("plain", 2), ("other", 2),
    ]  # fmt: skip
    assert {each["latency"]["completion_tokens"] for each in measurements} == {8.0}
    assert measurements[1]["relative"].keys() == {"tokens_per_second", "ttft", "itl", "e2e"}
    assert all(body["num_draft_tokens"] == 0 for _, _, body in stubs[0].asked)
    assert all("num_draft_tokens" not in body for _, _, body in stubs[1].asked)
    assert "sesame" not in result.output + file.read_text()


@pytest.mark.parametrize(
    ("keys", "second"),
    [([], None), (["--api-key", "sesame"], None), (["--api-key", "sesame", "--api-key", "b"], "b")],
)
def test_a_key_goes_to_the_server_that_it_is_for(keys: list[str], second: str | None) -> None:
    """The key in the environment is for the first server, whatever its variants: others must not see it."""
    ours, theirs = Stub(lambda body, busy: QUICK, key="sesame"), Stub(lambda body, busy: QUICK, key=second)
    with serving(ours) as one, serving(theirs) as two:
        urls = [part for url in (one, f"{one}#num_draft_tokens=0", two) for part in ("--url", url)]
        result = bench(*urls, *keys, *LIGHT, HEADSTART_API_KEY="" if keys else "sesame more")
    assert result.exit_code == 0, result.output
    assert (ours.keys, theirs.keys) == ({"sesame"}, {second})


def test_ctrl_c_keeps_what_servers_answered() -> None:
    number = iter(range(10**6))

    def answer(body: Any, busy: int) -> Schedule:
        if next(number) == 6:  # after one to check, two to warm up, and two that count
            os.kill(os.getpid(), signal.SIGINT)
        return QUICK

    with serving(Stub(answer)) as url:
        result = bench("--url", url, "--prompts", "short", "--concurrency", 1, "--requests", 2)
    assert result.exit_code == 130, result.output
    assert "**Not complete: interrupted**" in result.stdout


def test_a_server_completes_ones_own_prompts_at_a_rate(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Once upon a time\nIt was late\n")
    stub = Stub(lambda body, busy: Schedule(QUICK.pieces, usage=None, chat=False), models=["a", "b"])
    with serving(stub) as url:
        result = bench(
            "b", "--url", url, "--completions", "--prompts", own, "--rate", "200", "--requests", 2, "--repeats", 1,
            "--json",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["measurements"]
    assert found["condition"] == {"prompts": "own", "load": "rate", "value": 200.0}
    assert found["latency"]["counted"] == {"chunks": 2}
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
        assert "model other: answered 404: there is no model other" in refused("other", "--url", url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0-x"], "--k: '0-x' is not a number, a range such as 0-3, or auto"),
        (["--k", "0,3-1"], "--k: '3-1' is not a number"),
        (["--k", "1-3"], "--k must include 0"),
        (["--k", ""], "--k '': give one or more values"),
        (["--prompts", ","], "--prompts ',': give one or more values"),
        (["--prompts", "code,verse"], "--prompts verse: not one of code, prose"),
        (["--batch-size", "1,two"], "--batch-size 1,two: give whole numbers"),
        (["--concurrency", "4"], "--concurrency is for a server: give its --url"),
        (["--completions"], "--completions is for a server"),
        (["--output", "nowhere/report.md"], "--output nowhere/report.md: cannot be written"),
        (["--url", "http://a", "--k", "0"], "--k is for a model on this machine: leave out --url"),
        (["--url", "http://a", "--batch-size", "2"], "--batch-size is for a model on this machine"),
        (["--url", "http://a", "--concurrency", "few"], "--concurrency few: give whole numbers"),
        (["--url", "http://a", "--rate", "often"], "--rate often: give numbers"),
        (["--url", "http://a", "--rate", ""], "--rate '': give one or more values"),
        (["--url", "http://a", "--url", "http://a"], "two servers are called a: give --url NAME=URL"),
        (["--url", "a:8000"], "--url a:8000: not a URL"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_depth_that_the_model_does_not_draft_is_refused() -> None:
    assert "--k goes to 9, and this model drafts at most 8" in refused("--k", "0-9")
