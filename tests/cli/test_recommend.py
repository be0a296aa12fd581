"""`headstart recommend` lists what fits, with the figures of the cards."""

import json
from typing import Any

from typer.testing import CliRunner

from headstart.cards import find_card
from headstart.cli.main import app


def recommend(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["recommend", "--json", *arguments])
    assert result.exit_code == 0, result.output
    models = json.loads(result.output)["models"]
    return {model["model"]: model for model in models}


def test_what_fits_is_listed_at_the_most_bits_that_do() -> None:
    found = recommend("--memory-gb", "36")
    assert found["Qwen/Qwen3.6-27B"]["bits"] == 8
    assert found["Qwen/Qwen3.5-4B"]["bits"] == 16
    assert found["Qwen/Qwen3.5-35B-A3B"]["bits"] == 4
    assert "Qwen/Qwen3.5-122B-A10B" not in found
    for model in found.values():
        assert model["memory_gb"] <= 0.8 * 36
        assert model["download_gb"] >= model["memory_gb"]
    assert all("tiny" not in name for name in found)


def test_nothing_fits_into_nothing() -> None:
    assert recommend("--memory-gb", "0.1") == {}


def test_gains_are_those_of_the_cards() -> None:
    card = find_card("Qwen/Qwen3.6-27B")
    assert card is not None
    assert card.gain is not None
    assert recommend("--memory-gb", "100")["Qwen/Qwen3.6-27B"]["gain"] == card.gain.model_dump()
    text = CliRunner().invoke(app, ["recommend", "--memory-gb", "36"]).output
    assert "2.3 ×  expected: random" in text
    assert "not measured" in text
    assert "--bits 4" in text


def test_the_memory_is_this_machines() -> None:
    result = CliRunner().invoke(app, ["recommend"])
    assert result.exit_code == 0
    assert "GB of memory" in result.output
