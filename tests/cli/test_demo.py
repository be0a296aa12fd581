"""`headstart demo`: both ways measured, whatever comes out, and an error if their tokens differ."""

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from headstart import library
from headstart.cli.main import app


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("headstart.cli.demo", fromlist=["demo"])
    monkeypatch.setattr(module, "MAX_TOKENS", 8)
    monkeypatch.setattr(module, "MIN_RUNS", 2)
    monkeypatch.setattr(module, "MAX_RUNS", 2)


def test_it_shows_both_sides_and_what_was_measured() -> None:
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    out = result.stdout
    assert out.count("def") == 2
    assert out.lstrip().startswith("The small built-in model answers one question twice: without speculation, then")
    assert re.search(r"tokens per second +[\d.]+ +[\d.]+\n", out)
    assert re.search(r"passes of the model +8 +[1-8]\b", out)
    assert re.search(r"tokens per pass +1\.00 +[1-8]\.\d\d", out)
    assert re.search(r"With speculation: [\d.]+ times the tokens per second.", out)
    assert "The text is the same: all 8 tokens, in all 6 runs." in out
    assert "%" not in out, "of eight tokens there are too few drafts for a percentage"


def test_shares_of_positions_that_were_tried_often_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.bench.measurement.MIN_TRIES", 1)
    out = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "100"}).stdout
    assert re.search(r"drafts accepted, by position +– +\d+%", out)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts it answers another question."""
    honest = library.stream_generate

    def wrong(model: Any, tokenizer: Any, prompt: list[int], max_tokens: int, k: Any) -> Any:
        return honest(model, tokenizer, prompt[: None if k == 0 else 5], max_tokens, k=k)

    monkeypatch.setattr(library, "stream_generate", wrong)


@pytest.mark.usefixtures("wrong")
def test_tokens_that_differ_are_an_error() -> None:
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "tokens per second" in result.stdout
    assert "the same" not in result.stdout
    assert result.stderr.endswith("error: 3 runs did not generate the tokens of plain decoding\n")


@pytest.mark.usefixtures("wrong")
def test_tokens_that_differ_are_no_error_on_a_device_that_promises_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headstart.engine.prefill.is_batch_invariant", lambda model: False)
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    assert "The tokens differ in 3 of the runs: this device rounds" in result.stdout
    assert "the same" not in result.stdout


def test_a_model_without_a_head_has_nothing_to_show() -> None:
    result = CliRunner().invoke(app, ["demo"], env={"HEADSTART_MTP": "0"})
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: there is nothing to compare: switched off by HEADSTART_MTP\n"
