"""Reasoning through the real openai client: separate from content, accepted back, within its budget."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import Running, tokenizer
from scripted import ScriptedRoom, scripted

from headstart.sampling.bounds import MAX_RULES

HI = [{"role": "user", "content": "2 + 2?"}]
THOUGHT = "<think>\nTwo and two, 🙂.\n</think>\n\nIt is 4 <b>."
Here = tuple[Running, ScriptedRoom]


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=4) as server:
        yield server


def ask(here: Here, script: str, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    running, room = here
    room.scripts.append(script)
    known = {"model": "tiny", "messages": HI}
    return running.openai().chat.completions.create(**known | options, extra_body=extra or {})


def prompt(here: Here) -> str:
    return str(tokenizer().decode(here[1].requests[-1].prompt))


def test_a_thought_is_no_content(here: Here) -> None:
    answer = ask(here, THOUGHT)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two, 🙂.", "It is 4 <b>.")
    thought = tokenizer().encode("<think>\nTwo and two, 🙂.\n</think>", add_special_tokens=False)
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought)


def test_a_stream_tells_thoughts_first_and_apart(here: Here) -> None:
    told: list[tuple[str, str]] = []
    for chunk in ask(here, THOUGHT, stream=True):
        delta = chunk.choices[0].delta
        told += [("reasoning", text)] if (text := getattr(delta, "reasoning_content", "")) else []
        told += [("content", delta.content)] if delta.content else []
    voices = [voice for voice, _ in told]
    assert voices == sorted(voices, reverse=True)
    assert "".join(text for voice, text in told if voice == "reasoning") == "Two and two, 🙂."
    assert "".join(text for voice, text in told if voice == "content") == "It is 4 <b>."


def test_an_answer_without_a_thought_has_none(here: Here) -> None:
    answer = ask(here, "It is 4.")
    assert not hasattr(answer.choices[0].message, "reasoning_content")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_thought_that_is_cut_off_is_still_no_content(here: Here) -> None:
    choice = ask(here, THOUGHT, max_tokens=6).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.reasoning_content.startswith("Two")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_come_back_in_the_history(here: Here, name: str) -> None:
    history = [*HI, {"role": "assistant", "content": "4", name: "Two and two."}, {"role": "user", "content": "Sure?"}]
    answer = ask(here, "Yes.", messages=history)
    assert "<think>\nTwo and two.\n</think>\n\n4" in prompt(here)
    assert answer.generation_stats["ignored_fields"] == []


@pytest.mark.parametrize(
    ("extra", "thinks"),
    [
        ({}, False),  # as the template has it
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high", "enable_thinking": True}, True),
    ],
    ids=str,
)
def test_thinking_can_be_set_in_every_way(here: Here, extra: dict[str, Any], thinks: bool) -> None:
    answer = ask(here, "Yes.", extra)
    assert prompt(here).endswith("assistant\n" if thinks else "</think>\n\n")
    assert answer.generation_stats["ignored_fields"] == []


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"enable_thinking": False, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"enable_thinking": True, "thinking_budget": 2**31}, "thinking_budget"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(here: Here, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(here, "", extra)
    here[1].scripts.clear()
    assert error.value.param == param
    assert "lark" not in error.value.message  # which nobody sent


@pytest.mark.parametrize(
    ("extra", "param"), [({"enable_thinking": True}, "grammar"), ({"reasoning_effort": "low"}, "reasoning_effort")]
)
def test_a_grammar_too_large_with_reasoning_before_it_is_refused(
    here: Here, extra: dict[str, Any], param: str
) -> None:
    rules = [f'r{i}: "a"' for i in range(MAX_RULES - 1)]
    grammar = "\n".join(["start: r0", *rules])
    ask(here, "a", {"enable_thinking": False, "grammar": grammar})
    with pytest.raises(openai.BadRequestError, match="more than 4,096 rules") as error:
        ask(here, "", {**extra, "grammar": grammar})
    here[1].scripts.clear()
    assert error.value.param == param


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("budget", [0, 3])
def test_a_thought_ends_within_its_budget(server: Running, budget: int, k: int) -> None:
    """The real engine, with a random model, which is made to think by its first token."""
    think = tokenizer().encode("<think>", add_special_tokens=False)[0]
    extra = {"enable_thinking": True, "thinking_budget": budget, "num_draft_tokens": k}
    known: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 30, "logit_bias": {str(think): 100}}
    answer = server.openai().chat.completions.create(**known, extra_body=extra)
    assert answer.usage.completion_tokens_details.reasoning_tokens == budget + 2
    assert answer.usage.completion_tokens == 30


def test_effort_is_a_budget(here: Here) -> None:
    ask(here, "Yes.", {"reasoning_effort": "low"})
    grammar = here[1].requests[-1].params.grammar
    assert grammar is not None
    assert "{0,1024}" in grammar.source
    ask(here, "Yes.", {"reasoning_effort": "high"})
    assert here[1].requests[-1].params.grammar is None
