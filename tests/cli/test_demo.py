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
    monkeypatch.setattr(module, "FEWEST_RUNS", 2)
    monkeypatch.setattr(module, "MOST_RUNS", 2)


def test_it_shows_both_sides_and_what_was_measured() -> None:
    result = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    out = result.stdout
    assert out.count("def") == 2
    assert re.search(r"tokens/s, median +[\d.]+ +[\d.]+ +[\d.]+ ×", out)
    assert re.search(r"rounds +8 +[1-8]\b", out)
    assert re.search(r"tokens per round +1\.00 +[1-8]\.\d\d", out)
    assert re.search(r"acceptance by position +– +\d+%", out)
    assert "8 token ids, identical in all 6 runs." in out


def test_tokens_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = library.stream_generate

    def wrong(model: Any, tokenizer: Any, prompt: list[int], max_tokens: int, k: Any) -> Any:
        return honest(model, tokenizer, prompt[: None if k == 0 else 5], max_tokens, k=k)

    monkeypatch.setattr(library, "stream_generate", wrong)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "tokens/s, median" in result.stdout
    assert "identical" not in result.stdout
    assert result.stderr == "error: the token ids are not those of plain decoding in 3 of the runs\n"
