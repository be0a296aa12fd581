"""What benchmarks share: options, turns, ratios, answers; and that they import only what is there."""

import ast
import importlib
import sys
from pathlib import Path

import pytest

from bench import harness
from fixtures import random_model, random_prompt
from headstart.engine import Engine

SCRIPTS = sorted(Path(harness.__file__).parent.glob("*.py"))


def test_a_default_has_its_options_type(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "x.py some --k 0 3 --repeats 4 --stock --seeds 7"
    monkeypatch.setattr(sys, "argv", words.split())
    given = harness.options("Doc.", "model", k=[1], repeats=9, stock=False, seeds=[], dtype=None, rate=0.5)
    assert (given.model, given.k, given.repeats, given.stock, given.seeds) == ("some", [0, 3], 4, True, [7])
    assert (given.dtype, given.rate) == (None, 0.5)


def test_runs_take_turns_and_the_first_turn_does_not_count() -> None:
    said: list[str] = []
    found = harness.turns({name: lambda name=name: said.append(name) or len(said) for name in "ab"}, 2)
    assert said == list("ababab")
    assert found == {"a": [3, 5], "b": [4, 6]}


def test_a_ratio_is_taken_within_a_turn() -> None:
    assert harness.ratio([2.0, 20.0, 300.0], [1.0, 10.0, 100.0]) == 2.0


def test_cells_have_three_digits_that_count(capsys: pytest.CaptureFixture[str]) -> None:
    harness.line("a", 1234.5, 0.01234, 7, None)
    assert capsys.readouterr().out == "| a | 1234 | 0.0123 | 7 |  |\n"


def test_answers_are_the_engines_and_their_times_are_in_order() -> None:
    model = random_model()
    prompts = [random_prompt(model, length, seed=length) for length in (3, 9)]
    together = harness.answers(Engine(model), prompts, max_tokens=6, k=2)
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = harness.answers(Engine(model), [prompt], max_tokens=6, k=0)
        assert answer.tokens == alone.tokens
        assert len(answer.tokens) == sum(answer.counts) == 6
        assert answer.times == sorted(answer.times)
        assert all(gap >= 0 for gap in answer.gaps)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_imports_what_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "headstart":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
