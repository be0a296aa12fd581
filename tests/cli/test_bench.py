"""`headstart bench`: real depths, every output, and what is refused before anything is measured."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headstart.bench import features, local
from headstart.bench.local import decode_batch
from headstart.bench.measurement import Trial
from headstart.cli import progress
from headstart.cli.main import app
from headstart.errors import HeadstartError

SMALL = ["--temperature", "0", "--batch-size", "1", "--tokens", "20", "--repeats", "2", "--prompts", "code"]


def bench(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env=environment)


def refused(*arguments: object) -> str:
    result = bench(*arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    return last


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


def test_a_model_without_a_head_is_measured_at_the_depths_that_it_has() -> None:
    result = bench(*SMALL, "--k", "0-2,auto", "--json", HEADSTART_MTP="0")
    assert result.exit_code == 0, result.stderr
    assert [each["variant"] for each in json.loads(result.stdout)["measurements"]] == ["k=0", "k=auto"]
    assert "k = 0 and auto, which copies, are all there is: " in result.stderr


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
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
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
    which = f"{own},edit"
    result = bench("--prompts", which, "--batch-size", 1, "--tokens", 20, "--repeats", 1, "--k", 0, "--json")
    assert result.exit_code == 0, result.stderr
    measured = [each["condition"]["prompts"] for each in json.loads(result.stdout)["measurements"]]
    assert measured == ["sums", "lists", "edit"]


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
    monkeypatch.setattr(local, "decode_batch", lambda model, prompts, k, *rest: Trial(9, 1.0, 1.0, sequences=[[k]]))
    result = bench(*SMALL, "--k", "0,1")
    assert "**Not the tokens of k=0:** k=1, code, batch of 1." in result.stdout
    assert result.exit_code == 1
    assert "error: the tokens are not those of plain decoding" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0-x"], "--k: '0-x' is not a number, a range such as 0-3, or auto"),
        (["--k", "0,3-1"], "--k: '3-1' is not a number"),
        (["--k", "1-3"], "--k must include 0"),
        (["--k", ""], "--k '': give one or more values"),
        (["--prompts", ","], "--prompts ',': give one or more values"),
        (["--prompts", "code,verse"], "--prompts verse: not one of code, prose"),
        (["--batch-size", "1,two"], "--batch-size 1,two: give whole numbers above 0"),
        (["--batch-size", "1,0"], "--batch-size 1,0: give whole numbers above 0"),
        (["--batch-size", "1,99999999999"], "--batch-size 99999999999: at most 1024"),
        (["--k", "0-99999999999"], "--k goes to 99999999999, and at most 15"),
        (["--output", "nowhere/report.md"], "--output nowhere/report.md: cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_depth_that_the_model_does_not_draft_is_refused() -> None:
    assert "--k goes to 9, and this model drafts at most 8" in refused("--k", "0-9")


@pytest.mark.parametrize("arguments", [["--tokens", "19"], ["--repeats", "0"]])
def test_too_few_to_time_is_refused(arguments: list[str]) -> None:
    result = bench("no-such-model", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '{arguments[0]}'" in result.stderr


def test_features_are_measured_beside_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("plain", "temperature .8", "JSON schema", "adapter of rank 8", "KV in 8 bits")
    monkeypatch.setattr(features, "FEATURES", [each for each in features.FEATURES if each.name in some])
    given = [
        "--features",
        "--context",
        "40",
        "--batch-size",
        "2",
        "--k",
        "0,auto",
        "--repeats",
        "1",
        "--tokens",
        "20",
    ]
    result = bench(*given, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert {(row["feature"], *row["cell"]) for row in report["rows"]} == {
        (name, 40, 2, k) for name in some for k in (0, "auto")
    }
    assert all(row["to_plain"]["median"] == 1 for row in report["rows"] if row["feature"] == "plain")
    assert all(row["step_ms"]["median"] > 0 for row in report["rows"])
    assert report["refused"] == {}
    assert refused("--features", "--context", "0").startswith("error: --context 0")


def test_features_that_a_model_lacks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> dict[str, Path]:
        raise HeadstartError("no room")

    monkeypatch.setattr(features, "_write_adapters", fails)
    monkeypatch.setattr(features, "FEATURES", [features.FEATURES[0], features.Feature("LoRA", model="adapted")])
    result = bench(
        "--features", "--context", "20", "--batch-size", "1", "--k", "0", "--repeats", "1", "--tokens", "20"
    )
    assert result.exit_code == 0, result.stderr
    assert "adapted: not measured, no room" in result.stdout
    assert "LoRA" not in result.stdout


def test_the_card_says_how_to_sample_unless_flags_do() -> None:
    small = [*SMALL[2:], "--k", "0,2", "--json"]
    report = json.loads(bench(*small).stdout)
    assert report["plan"]["sampling"] == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert {each["identical"] for each in report["measurements"]} == {None}  # every run draws anew
    seeded = bench(*small, "--temperature", "0.8", "--seed", "3")
    assert {each["identical"] for each in json.loads(seeded.stdout)["measurements"]} == {True}
    assert "k=0, k=2 on code prompts, batch of 1" in seeded.stderr
    assert "temperature 0.8, seed 3" in seeded.stderr


def test_ctrl_c_reports_the_features_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([decode_batch] * 2)  # all of the first cell

    def interrupted(*_: object, **__: object) -> Trial:
        raise KeyboardInterrupt

    monkeypatch.setattr(features, "decode_batch", lambda *asked, **given: next(runs, interrupted)(*asked, **given))
    monkeypatch.setattr(features, "FEATURES", features.FEATURES[:1])
    given = ["--features", "--context", "20,30", "--batch-size", "1", "--k", "0", "--repeats", "1", "--tokens", "20"]
    report = json.loads(bench(*given, "--json").stdout)
    assert [row["cell"] for row in report["rows"]] == [[20, 1, 0]]
    assert report["refused"] == {"what is missing": "interrupted"}
