"""`headstart bench`: a small sweep of a real model, its outputs, and what is refused before anything is measured."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headstart.bench import cost, sweep
from headstart.bench.run import begin
from headstart.cli.main import app

SMALL = ["--rows", "1", "--tokens", "20", "--repeats", "2", "--kinds", "code"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "STEPS", 1)
    monkeypatch.setattr("headstart.engine.engine.WARM_UP_BUDGET", 0.2)


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_a_sweep_is_shown_and_written_in_every_form(tmp_path: Path) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("json", "md", "svg")}
    result = bench(
        *SMALL, "--k", "0,2,auto", "--json", files["json"], "--report", files["md"], "--plot", files["svg"]
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout == files["md"].read_text()
    assert result.stdout.startswith("# tiny-qwen3.5\n")
    assert "20 tokens a row, medians of 2 interleaved runs" in result.stdout
    report = json.loads(files["json"].read_text())
    assert [figure["k"] for figure in report["figures"]] == [0, 2, "auto"]
    assert all(figure["identical"] for figure in report["figures"])
    assert report["exact"]
    assert report["figures"][1]["drafts_per_round"] > 1.5
    assert [(c["rows"], c["k"]) for c in report["costs"]] == [(1, 0), (1, 2)]
    assert [cell["kind"] for cell in report["auto"]["cells"]] == ["code"]
    assert "<svg" in files["svg"].read_text()
    assert str(Path.home()) not in result.stdout + files["json"].read_text()


@pytest.mark.slow
def test_an_imposed_acceptance_sets_the_depths_and_is_marked() -> None:
    result = bench(*SMALL, "--acceptance", "1,0", "--json", "-")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["imposed_acceptance"] == [1.0, 0.0]
    assert [figure["k"] for figure in report["figures"]] == [0, 1, 2]
    assert report["figures"][2]["conditional"] == [1.0, 0.0]
    assert report["auto"] is None


@pytest.mark.slow
def test_own_prompts_are_measured_by_their_kinds(tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text('{"kind": "sums", "text": "1 + 1 = 2"}\n{"kind": "lists", "text": "a, b, c"}\n')
    result = bench("--prompts", own, "--rows", "1", "--tokens", "20", "--repeats", "2", "--k", "0", "--json", "-")
    assert result.exit_code == 0, result.stderr
    assert [figure["kind"] for figure in json.loads(result.stdout)["figures"]] == ["sums", "lists"]


def interrupted(*_: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["the sweep", pytest.param("the costs", marks=pytest.mark.slow)])
def test_ctrl_c_keeps_whole_repeats_and_says_so(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([begin, begin, begin])  # one warms up
    if where == "the sweep":
        monkeypatch.setattr(sweep, "begin", lambda *asked: next(runs, interrupted)(*asked))
    else:
        monkeypatch.setattr(cost, "_seconds", interrupted)
    result = bench(*SMALL, "--repeats", 3 if where == "the sweep" else 2, "--k", "0", "--json", "-")
    assert result.exit_code == 130, result.output
    report = json.loads(result.stdout)
    assert (report["stopped"], report["repeats"], report["costs"]) == ("interrupted", 2, [])
    assert [figure["k"] for figure in report["figures"]] == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0-x"], "--k: 'x' is not a whole number"),
        (["--k", "1-3"], "--k must hold 0"),
        (["--k", "0,3-1"], "--k 3-1: say 1-3"),
        (["--k", ""], "--k '': name one or more"),
        (["--kinds", ","], "--kinds ',': name one or more"),
        (["--k", "0-9"], "--k goes to 9, and this model drafts at most 8"),
        (["--rows", "1,two"], "--rows: 'two' is not a whole number"),
        (["--kinds", "code,verse"], "--kinds: 'verse' is not one of"),
        (["--acceptance", "high"], "--acceptance high"),
        (["--acceptance", ".5", "--k", "0-2"], "--acceptance has 1 positions and --k goes to 2"),
        (["--plot", "speed.bmp"], "--plot speed.bmp: the name must end in"),
        (["--report", "nowhere/report.md"], "--report nowhere/report.md: there is no such folder"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: cannot be read"),
        (["--prompts", "a.txt", "--kinds", "code"], "--kinds chooses among the built-in prompts"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
