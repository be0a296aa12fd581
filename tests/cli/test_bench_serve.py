"""`headstart bench-serve`: its outputs, and what is said of servers that cannot be measured."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from checkpoints import write
from headstart.cli.main import app
from loopback_hub import running_hub
from stub_server import Schedule, Stub

QUICK = Schedule([(0.001, 1), (0.001, 3), (0.001, 4)], usage={"prompt_tokens": 9})
SMALL = ["--lengths", "short", "--requests", "2", "--repeats", "2", "--concurrency", "1,2"]


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """In a thread of its own, on the clock of this machine."""
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


def bench_serve(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench-serve", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = bench_serve(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_servers_are_compared_and_shown_in_every_form(tmp_path: Path) -> None:
    files = {name: tmp_path / f"load.{name}" for name in ("json", "csv", "md", "svg")}
    outputs = [part for name, option in zip(files, ("json", "csv", "report", "plot"), strict=True)
               for part in (f"--{option}", files[name])]  # fmt: skip
    stubs = [Stub(lambda body, busy: QUICK, key="sesame") for _ in range(2)]
    with serving(stubs[0]) as one, serving(stubs[1]) as two:
        result = bench_serve(
            "--compare", f"{one}#num_draft_tokens=0,{two}", "--names", "plain,other", "--api-key", "sesame",
            *SMALL, *outputs,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == files["md"].read_text()
    assert result.stdout.startswith("# Under load: plain, other\n")
    assert "## plain against others" in result.stdout
    report = json.loads(files["json"].read_text())
    assert [(f["target"], f["cell"]["concurrency"]) for f in report["figures"]] == [
        ("plain", 1), ("other", 1), ("plain", 2), ("other", 2),
    ]  # fmt: skip
    assert {f["tokens"] for f in report["figures"]} == {8.0}
    assert [ratio["cell"]["concurrency"] for ratio in report["ratios"]] == [1, 2]
    assert len(files["csv"].read_text().splitlines()) == 1 + 2 * 2 * (2 + 4)
    assert "<svg" in files["svg"].read_text()
    assert all(body["num_draft_tokens"] == 0 for _, _, body in stubs[0].asked)
    assert all("num_draft_tokens" not in body for _, _, body in stubs[1].asked)
    assert "sesame" not in result.output + "".join(files[name].read_text() for name in ("json", "csv", "md"))


@pytest.mark.parametrize(
    ("given", "second"),
    [([], None), (["--api-key", "sesame,"], None), (["--api-key", "sesame,other"], "other")],
)
def test_a_key_goes_to_the_server_that_it_is_for(given: list[str], second: str | None) -> None:
    """What is in the environment is for the first, under any name: others would be told a secret."""
    ours, theirs = Stub(lambda body, busy: QUICK, key="sesame"), Stub(lambda body, busy: QUICK, key=second)
    with serving(ours) as one, serving(theirs) as two:
        compared = [one, two] if given else [one, two, f"{one}#num_draft_tokens=0"]
        arguments = ["bench-serve", "--compare", ",".join(compared), *given, *SMALL]
        result = CliRunner().invoke(app, arguments, env={"HEADSTART_API_KEY": "sesame more"})
    assert result.exit_code == 0, result.output
    assert theirs.keys == {second}


def test_of_a_hub_model_that_counts_tokens_no_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub(lambda body, busy: Schedule(QUICK.pieces, usage=None))
    with running_hub(monkeypatch, tmp_path / "cache") as hub, serving(stub) as url:
        hub.models["org/model"] = write(tmp_path / "model")
        known = ["--lengths", "short", "--concurrency", 1, "--requests", 2, "--repeats", 1, "--json", "-"]
        results = [bench_serve(url, *known, "--tokenizer", "org/model")]
        requests = hub.requests
        results.append(bench_serve(url, *known, "--tokenizer", "org/model"))
        assert hub.requests == requests, "it is in the cache"
    for result in results:
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["figures"][0]["counted"] == {"tokenizer": 2}
    assert "tokenizer.json" in hub.downloaded
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]


def test_ctrl_c_keeps_what_there_is_and_says_so(tmp_path: Path) -> None:
    number = iter(range(10**6))

    def answer(body: Any, busy: int) -> Schedule:
        if next(number) == 6:  # after the first one, two to warm up, and two that count
            os.kill(os.getpid(), signal.SIGINT)
        return QUICK

    with serving(Stub(answer)) as url:
        known = ["--lengths", "short", "--concurrency", 1, "--requests", 2, "--report", tmp_path / "load.md"]
        result = bench_serve(url, *known)
    assert result.exit_code == 130, result.output
    assert "**Not complete: interrupted**" in (tmp_path / "load.md").read_text()
    assert result.stdout == (tmp_path / "load.md").read_text()


def test_one_server_is_asked_for_completions_of_ones_own_prompts(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Once upon a time\nIt was late\n")
    stub = Stub(lambda body, busy: Schedule(QUICK.pieces, usage=None, chat=False))
    with serving(stub) as url:
        result = bench_serve(
            url, "--completions", "--prompts", own, "--rate", "200", "--requests", 2, "--repeats", 1,
            "--tokenizer", "tiny-qwen3.5", "--json", "-",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(f["cell"]["prompts"], f["cell"]["rate"]) for f in report["figures"]] == [("own", 200.0)]
    assert report["figures"][0]["counted"] == {"tokenizer": 2}
    assert report["ratios"] == []
    assert {(path, body["prompt"]) for _, path, body in stub.asked} == {
        ("/v1/completions", "Once upon a time"),
        ("/v1/completions", "It was late"),
    }


def test_what_was_measured_before_a_server_died_is_kept(tmp_path: Path) -> None:
    number = iter(range(10**6))
    broken: tuple[int, Any] = (500, {"error": {"message": "dead"}})
    with serving(Stub(lambda body, busy: QUICK if next(number) < 5 else broken)) as url:
        arguments = ["--lengths", "short", "--concurrency", 1, "--requests", 2, "--report", tmp_path / "load.md"]
        error = refused(url, "--names", "it", *arguments)
    assert "it: no request was answered (short, 1 at a time, 0% hits): answered 500: dead; 1 runs were" in error
    assert "**Not complete: it: no request was answered" in (tmp_path / "load.md").read_text()


def test_a_server_that_is_not_there_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
    assert f"{url}/v1: cannot be reached: is the server running there?" in refused(url)


def test_a_model_that_is_not_there_is_one_line() -> None:
    with serving(Stub(lambda body, busy: QUICK)) as url:
        assert "model other: answered 404: there is no model other" in refused(url, "--model", "other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the server's URL, or several with --compare"),
        (["http://a", "--compare", "http://a,http://b"], "give the server's URL, or several with --compare"),
        (["--compare", "http://a"], "--compare http://a: give two or more"),
        (["http://a", "--names", "one,two"], "--names one,two: give 1"),
        (["--compare", "http://a,http://b", "--model", "1,2,3"], "--model: give one, or 2"),
        (["http://a", "--concurrency", "few"], "--concurrency: 'few' is not a whole number"),
        (["http://a", "--rate", "often"], "--rate often"),
        (["http://a", "--concurrency", ","], "--concurrency ',': name one or more"),
        (["http://a", "--lengths", ","], "--lengths ',': name one or more"),
        (["http://a", "--hits", ""], "--hits '': name one or more"),
        (["http://a", "--rate", ""], "--rate '': name one or more"),
        (["--compare", "http://a,http://b", "--api-key", "1,2,3"], "--api-key: give one, or 2"),
        (["http://a", "--lengths", "short", "--prompts", "a.txt"], "--lengths are of prompts that are made up"),
        (["http://a", "--csv", "nowhere/a.csv"], "--csv nowhere/a.csv: there is no such folder"),
        (["http://a", "--plot", "a.bmp"], "--plot a.bmp: the name must end in"),
        (["a:8000"], "a:8000: not an address"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)
