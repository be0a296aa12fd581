"""Reasoning, tool calls and conversations through the real anthropic client, with scripted output."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel
from running import Running, tokenizer
from scripted import ScriptedRoom, scripted

from headstart.server.chat import Chat, ChatTemplate

HI = [{"role": "user", "content": "hi"}]
ADD = {
    "name": "add",
    "description": "The sum of two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
THOUGHT = "<think>\nHm, 🙂.\n</think>\n\n"

Here = tuple[Running, ScriptedRoom]


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=4) as server:
        yield server


def create(here: Here, script: str, **fields: Any) -> Any:
    here[1].scripts.append(script)
    return here[0].anthropic().messages.create(**{"model": "tiny", "max_tokens": 200, "messages": HI, **fields})


def stream(here: Here, script: str, **fields: Any) -> tuple[list[Any], Any]:
    """The events that the client passes on, and the message that it makes of them."""
    here[1].scripts.append(script)
    with (
        here[0]
        .anthropic()
        .messages.stream(**{"model": "tiny", "max_tokens": 200, "messages": HI, **fields}) as events
    ):
        return list(events), events.get_final_message()


def raw(here: Here, script: str, **fields: Any) -> list[Any]:
    """The events as they are sent."""
    here[1].scripts.append(script)
    body = {"model": "tiny", "max_tokens": 200, "messages": HI, "stream": True, **fields}
    return list(here[0].anthropic().messages.create(**body))


def blocks(message: Any) -> list[dict[str, Any]]:
    """Without the ids of calls, which are new every time."""
    kept = ("type", "text", "thinking", "signature", "name", "input")
    return [{k: v for k, v in block.to_dict().items() if k in kept} for block in message.content]


def prompt(here: Here) -> str:
    """What the model was given to read last."""
    return str(tokenizer().decode(list(here[1].requests[-1].prompt)))


def templated(messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"enable_thinking": None, "add_generation_prompt": True} | options
    return str(tokenizer().apply_chat_template(messages, tokenize=False, **options))


def test_a_message_is_thinking_text_and_calls_in_their_order(here: Here) -> None:
    answer = create(here, THOUGHT + "Let me see.\n" + CALL % (2, 3) + "\n" + CALL % (4, 5), tools=[ADD])
    thinking, text, *calls = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm, 🙂.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "Let me see.")
    assert [(call.type, call.name, call.input) for call in calls] == [
        ("tool_use", "add", {"a": 2, "b": 3}),
        ("tool_use", "add", {"a": 4, "b": 5}),
    ]
    assert len({call.id for call in calls}) == 2
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    assert 0 < answer.usage.output_tokens_details.thinking_tokens < answer.usage.output_tokens


@pytest.mark.parametrize(
    "script",
    ["Just words.", "", THOUGHT + "An answer.", THOUGHT, THOUGHT + CALL % (1, 2), CALL % (1, 2) + "\nand more",
     f"<think>\nfirst {CALL % (1, 2)} then\n</think>\n\nyes", CALL % (1, 2) + "\n" + CALL % (3, 4)],
)  # fmt: skip
def test_a_stream_makes_the_same_message_as_the_whole(here: Here, script: str) -> None:
    whole = create(here, script, tools=[ADD])
    _, streamed = stream(here, script, tools=[ADD])
    assert blocks(streamed) == blocks(whole)
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)
    assert "tool_call" not in str(blocks(whole)) + str(blocks(streamed))
    assert "think>" not in str(blocks(whole)) + str(blocks(streamed))


def test_events_come_in_anthropics_order(here: Here) -> None:
    events = raw(here, THOUGHT + "Let me see.\n" + CALL % (2, 3), tools=[ADD])
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    within = [(event.type, event.index) for event in events[1:-2]]
    for index in range(3):
        of_block = [kind for kind, i in within if i == index]
        assert (of_block[0], of_block[-1]) == ("content_block_start", "content_block_stop")
        assert set(of_block[1:-1]) == {"content_block_delta"}
    assert [i for _, i in within] == sorted(i for _, i in within), "a block ends before the next begins"
    starts = [event.content_block for event in events if event.type == "content_block_start"]
    assert [(start.type, getattr(start, "input", None)) for start in starts] == [
        ("thinking", None), ("text", None), ("tool_use", {})
    ]  # fmt: skip
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert sorted(set(deltas)) == ["input_json_delta", "signature_delta", "text_delta", "thinking_delta"]
    assert deltas.count("signature_delta") == 1
    assert deltas.index("signature_delta") == deltas.count("thinking_delta")
    assert deltas.count("input_json_delta") > 3, "arguments come as they are written"
    assert (events[0].message.content, events[0].message.stop_reason) == ([], None)
    assert events[-2].usage.output_tokens > 0
    assert events[-2].generation_stats["rounds"] > 0


def test_tools_over_two_rounds(here: Here) -> None:
    """The second prompt continues the first and its answer, to the letter: so it is found in the cache."""
    tools = [ADD, {**ADD, "name": "subtract"}]
    said = THOUGHT + "Let me see.\n" + CALL % (2, 3) + "\n" + CALL % (4, 5)
    fields = {"tools": tools, "thinking": {"type": "enabled", "budget_tokens": 1024}, "system": "Be brief."}
    asked = [{"role": "user", "content": "What is 2 + 3, and 4 + 5?"}]
    first = create(here, said, messages=asked, **fields)
    before = prompt(here)
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "5"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": [{"type": "text", "text": "9"}]},
        {"type": "text", "text": "Go on."},
    ]
    history = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = create(here, "5 and 9.", messages=history, **fields)
    assert (blocks(second), second.stop_reason) == ([{"type": "text", "text": "5 and 9."}], "end_turn")
    after = prompt(here)
    assert after.startswith(before + said)
    assert after[len(before + said) :] == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n9\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_stay_where_they_are(here: Here) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
        {"role": "system", "content": "Now be brief."},
        {"role": "user", "content": "four"},
    ]
    create(here, "five", messages=messages, system=[{"type": "text", "text": "A "}, {"type": "text", "text": "B"}])
    assert prompt(here) == templated(
        [
            {"role": "system", "content": "A B"},
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "three"},
            {"role": "system", "content": "Now be brief."},
            {"role": "user", "content": "four"},
        ]
    )


REFUSES = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
LEAVES_OUT = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"


@pytest.mark.parametrize(("template", "role"), [(REFUSES, "user"), (LEAVES_OUT, "user"), ("", "system")])
def test_a_late_system_message_is_read_where_it_is_whatever_the_template_thinks(
    monkeypatch: pytest.MonkeyPatch, template: str, role: str
) -> None:
    """Qwen3.5's refuses them, and Claude Code sends them."""
    written = "{% for m in messages %}" + template + "[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer()._tokenizer, "chat_template", written)
    messages = [*HI, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "so?"}]
    with scripted() as here:
        create(here, "hello", messages=messages, system="An agent.")
        assert prompt(here) == f"[system]An agent.[user]hi[{role}]Be brief.[user]so?"


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [(None, None), ({"type": "disabled"}, False), ({"type": "adaptive"}, True),
     ({"type": "enabled", "budget_tokens": 1024}, True)],
)  # fmt: skip
def test_the_model_thinks_when_the_request_asks_for_it(
    here: Here, monkeypatch: pytest.MonkeyPatch, thinking: Any, expected: bool | None
) -> None:
    render, chats = ChatTemplate.render, list[Chat]()
    monkeypatch.setattr(ChatTemplate, "render", lambda *these: (chats.append(these[1]), render(*these))[1])
    create(here, "hello", extra_body={"thinking": thinking})
    assert prompt(here) == templated(HI, enable_thinking=expected)
    assert [chat.thinking for chat in chats] == [expected], "this template takes no for an answer where none is given"
    bound = thinking is not None and "budget_tokens" in thinking
    assert (here[1].requests[-1].params.grammar is not None) == bound


def test_thoughts_end_within_their_budget(here: Here, anthropic: ModuleType) -> None:
    thinking = {"type": "enabled", "budget_tokens": 3}
    answer = create(here, "<think>\n</think>\n\nhello", thinking=thinking)
    assert [block.type for block in answer.content] == ["text"]
    with pytest.raises(
        anthropic.InternalServerError, match="grammar"
    ):  # what the engine says of a script that goes on
        create(here, "<think>\nlong and longer and longer\n</think>\n\nhello", thinking=thinking)


ANY, NAMED = {"type": "any"}, {"type": "tool", "name": "add"}
CALLED, TWICE = CALL % (1, 2), CALL % (1, 2) + "\n" + CALL % (3, 4)


@pytest.mark.parametrize(
    ("choice", "script", "calls"),
    [({"type": "auto"}, "words", 0), ({"type": "auto"}, CALLED, 1), (ANY, CALLED, 1), (ANY, TWICE, 2),
     ({**ANY, "disable_parallel_tool_use": True}, TWICE, 1), (NAMED, CALLED, 1), (NAMED, TWICE, 1)],
)  # fmt: skip
def test_a_tool_choice_is_kept_to(here: Here, choice: Any, script: str, calls: int) -> None:
    answer = create(here, script, tools=[ADD, {**ADD, "name": "subtract"}], tool_choice=choice)
    assert [block.type for block in answer.content].count("tool_use") == calls
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")


@pytest.mark.parametrize(("choice", "script"), [(ANY, "words"), ({**NAMED, "name": "subtract"}, CALLED)])
def test_what_a_tool_choice_forbids_cannot_be_generated(
    here: Here, choice: Any, script: str, anthropic: ModuleType
) -> None:
    with pytest.raises(
        anthropic.InternalServerError, match="grammar"
    ):  # where a model would have chosen another token
        create(here, script, tools=[ADD, {**ADD, "name": "subtract"}], tool_choice=choice)


def test_no_tool_is_called_where_none_may_be(here: Here) -> None:
    create(here, "words", tools=[ADD], tool_choice={"type": "none"})
    assert prompt(here) == templated(HI)
    mark = tokenizer().get_vocab()["<tool_call>"]
    assert here[1].requests[-1].params.logit_bias == {mark: -100.0}


def test_a_call_that_breaks_off_is_no_call(here: Here) -> None:
    """A stream has sent part of it by then. Neither has the stop reason for which clients run calls."""
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b":'
    for script, most, reason in ((f"So:\n{written}", 999, "end_turn"), (f"So:\n{written} 3, ", 0, "max_tokens")):
        most = most or len(tokenizer().encode(f"So:\n{written}", add_special_tokens=False))
        whole = create(here, script, tools=[ADD], max_tokens=most)
        texts = [{"type": "text", "text": text} for text in ("So:", written)]
        assert (blocks(whole), whole.stop_reason) == (texts, reason)
        _, streamed = stream(here, script, tools=[ADD], max_tokens=most)
        text, call = blocks(streamed)
        assert (text["text"], call["input"], streamed.stop_reason) == ("So:", {"a": 2}, reason)


@pytest.mark.parametrize("written", ['{"a": 2 2}', '{"a": b}'])
def test_a_malformed_call_is_no_call(here: Here, written: str) -> None:
    call = f'<tool_call>\n{{"name": "add", "arguments": {written}'
    whole = create(here, f"{call}}}\n</tool_call>", tools=[ADD])
    assert (blocks(whole), whole.stop_reason) == ([{"type": "text", "text": call}], "end_turn")


def test_half_a_character_in_a_call_does_not_break_the_message(here: Here) -> None:
    """Which JSON can hold, and UTF-8 cannot."""
    say = {**ADD, "name": "say", "input_schema": {"type": "object", "properties": {"a": {"type": "object"}}}}
    in_json = '<tool_call>\n{"name": "say", "arguments": {"a": {"b": "x\\ud83d"}}}\n</tool_call>'
    in_xml = '<function=say>\n<parameter=a>\n{"b": "x\\ud83d"}\n</parameter>\n</function>'
    for script in (in_json, in_xml):
        (block,) = create(here, script, tools=[say]).content
        assert block.input == {"a": {"b": "x\ufffd"}}


def test_stop_sequences_are_named(here: Here) -> None:
    answer = create(here, "one two three", stop_sequences=["never", " three"])
    assert blocks(answer) == [{"type": "text", "text": "one two"}]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " three")
    _, streamed = stream(here, "one two three", stop_sequences=["never", " three"])
    assert (blocks(streamed), streamed.stop_sequence) == (blocks(answer), " three")


def test_an_answer_at_its_limit_reports_it(here: Here) -> None:
    answer = create(here, "one two three four five", max_tokens=3)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


class Sum(BaseModel):
    a: int
    b: int


def test_structured_output_is_parsed(here: Here, anthropic: ModuleType) -> None:
    here[1].scripts.append('{"a": 2, "b": 3}')
    answer = here[0].anthropic().messages.parse(model="tiny", max_tokens=99, messages=HI, output_format=Sum)  # type: ignore[arg-type]
    assert answer.parsed_output == Sum(a=2, b=3)
    with pytest.raises(anthropic.InternalServerError, match="grammar"):
        create(here, "no JSON", output_config={"format": {"type": "json_schema", "schema": Sum.model_json_schema()}})


def test_what_is_not_known_or_not_used_is_listed(here: Here) -> None:
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {}, "cache_control": {"type": "ephemeral"}}
    answer = create(
        here,
        "hello",
        system=[{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}],
        messages=[*HI, {"role": "assistant", "content": [redacted, call]}, {"role": "user", "content": [result]}],
        tools=[{**ADD, "strict": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        metadata={"user_id": "me"},
        service_tier="auto",
    )
    assert answer.generation_stats["ignored_fields"] == [
        "messages[].content[].is_error",
        "service_tier",
        "tools[].strict",
    ]


@pytest.mark.parametrize("as_blocks", [False, True])
def test_the_billing_line_is_left_out(here: Here, as_blocks: bool) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
    told = "You are an agent.\nx-anthropic-billing-header: is only left out in front."
    system = [{"type": "text", "text": line}, {"type": "text", "text": told}] if as_blocks else f"{line}\n{told}"
    create(here, "hello", system=system)
    assert prompt(here) == templated([{"role": "system", "content": told}, *HI])
    create(here, "hello", system=line)
    assert prompt(here) == templated(HI)
