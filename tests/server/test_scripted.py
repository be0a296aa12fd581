"""The scripted model, which other tests rely on."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from running import Running
from scripted import ScriptedRoom, scripted

TEXT = '<think>\nHm, 🙂.\n</think>\n\nIt is "4" <\n<tool_call>\n{}\n</tool_call>'


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Running, ScriptedRoom]]:
    with scripted(burst=5) as server:
        yield server


def ask(here: tuple[Running, ScriptedRoom], script: str, **options: Any) -> Any:
    running, room = here
    room.scripts.append(script)
    client: OpenAI = running.openai()
    options = {"max_tokens": 200} | options
    return client.completions.create(model="tiny", prompt="2 + 2", **options)


def test_a_script_is_generated_word_for_word(here: tuple[Running, ScriptedRoom]) -> None:
    answer = ask(here, TEXT)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert here[1].requests[-1].params.max_tokens == 200


@pytest.mark.parametrize("text", [" a", "  a", " ", "\n a", " 🙂", " <think>"])
def test_a_completion_keeps_the_space_that_it_begins_with(here: tuple[Running, ScriptedRoom], text: str) -> None:
    assert ask(here, text).choices[0].text == text
    assert "".join(chunk.choices[0].text for chunk in ask(here, text, stream=True)) == text


def test_a_script_comes_in_bursts(here: tuple[Running, ScriptedRoom]) -> None:
    chunks = [chunk.choices[0].text for chunk in ask(here, TEXT, stream=True)]
    assert "".join(chunks) == TEXT
    tokens = here[0].served.tokenizer.encode(TEXT, add_special_tokens=False)
    assert 3 < len(chunks) < len(tokens)


def test_limits_and_stop_strings_cut_a_script(here: tuple[Running, ScriptedRoom]) -> None:
    cut = ask(here, TEXT, max_tokens=3)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 3)
    assert ask(here, TEXT, stop=' "4"').choices[0].text == TEXT.split(' "4"')[0]
