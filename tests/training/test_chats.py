"""Functions become conversations in the chat template's own format."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

import headstart
from training.chats import KINDS, chats
from training.corpus import template
from training.functions import Function, functions

SOURCE = '''
def {name}(path, count: int = 3, verbose: bool = False):
    """Return the {name} lines of a file. More is not told.

    Args:
        path: where.
    """
    lines = open(path).readlines()
    for line in lines:
        print(line)
    if not lines:
        raise ValueError("empty")
    return lines[:count]
'''


@lru_cache
def tokenizer() -> TokenizerWrapper:
    return load(Path(headstart.__file__).parent / "builtin" / "tiny-qwen3.5")


@lru_cache
def pool() -> tuple[Function, ...]:
    return tuple(functions("\n".join(SOURCE.format(name=f"take_{i}") for i in range(200))))


def rendered() -> list[str]:
    return list(chats(pool(), template(tokenizer())))


def test_a_function_is_its_first_sentence_its_source_and_the_steps_of_its_body() -> None:
    function = pool()[7]
    assert function.name == "take_7"
    assert function.purpose == "Return the take_7 lines of a file."
    assert '"""Return the take_7 lines of a file."""' in function.source
    assert "Args" not in function.source
    assert [p.required for p in function.parameters] == [True, False, False]
    assert function.steps == (
        "set `lines`",
        "go through `lines` with `line`",
        "check `not lines`",
        "return `lines[:count]`",
    )


def test_every_function_is_used_and_the_corpus_does_not_depend_on_the_run() -> None:
    texts = rendered()
    assert texts == rendered()
    everything = "".join(texts)
    used = [f for f in pool() if f"def {f.name}(" in everything or f'{{"name": "{f.name}", "arg' in everything]
    assert len(used) >= len(pool()) - 1  # the last one may wait for a second turn


def test_there_are_thoughts_tools_and_second_turns_about_as_often_as_wished() -> None:
    texts = rendered()
    assert len(texts) > 150
    thoughts = [text for text in texts if "<think>\n\n" not in text and "<tools>" not in text]
    tools = [text for text in texts if "<tools>" in text]
    turns = [text for text in texts if text.count("<|im_start|>user") == 2 and "<tool_response>" not in text]
    for found, kind in ((thoughts, "think"), (tools, "tools")):
        assert len(found) == pytest.approx(KINDS[kind] * len(pool()), rel=0.5)
    assert len(turns) == pytest.approx(KINDS["turns"] * len(pool()) / 2, rel=0.6)


def test_a_call_has_arguments_that_fit_the_tools_schema_and_that_the_user_named() -> None:
    called = [text for text in rendered() if "<tools>" in text]
    assert called
    for text in called:
        tools = [json.loads(line) for line in _between(text, "<tools>\n", "\n</tools>").splitlines()]
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        asked = _between(text, "<|im_start|>user\n", "<|im_end|>")
        answer = text.split("<|im_start|>assistant\n", 1)[1]
        call: dict[str, Any] = json.loads(_between(answer, "<tool_call>\n", "\n</tool_call>"))
        jsonschema.validate(call["arguments"], schemas[call["name"]])
        for value in call["arguments"].values():
            assert json.dumps(value) in asked


def _between(text: str, before: str, after: str) -> str:
    return text.split(before, 1)[1].split(after, 1)[0]
