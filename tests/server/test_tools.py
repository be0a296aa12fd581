"""Tool calls through the real openai client: output becomes calls, and results become the next prompt."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import Running, running, tokenizer
from scripted import ScriptedRoom, scripted

from headstart.server.markup import Markup

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
OSLO = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
HI = [{"role": "user", "content": "What is the weather like?"}]
Here = tuple[Running, ScriptedRoom]


@pytest.fixture(scope="module", params=[1, 7], ids=["a token at a time", "in bursts"])
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    with scripted(burst=request.param) as server:
        yield server


def ask(here: Here, script: str, **options: Any) -> Any:
    running, room = here
    room.scripts.append(script)
    known = {"model": "tiny", "messages": HI, "tools": TOOLS}
    return running.openai().chat.completions.create(**known | options)


def gathered(chunks: Any) -> tuple[dict[str, Any], str | None, list[Any]]:
    """What a stream adds up to, its finish_reason, and the deltas of its calls."""
    message: dict[str, Any] = {"content": "", "calls": {}}
    reason, deltas = None, []
    for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                deltas.append(call)
                told = message["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                told["name"] += call.function.name or ""
                told["arguments"] += call.function.arguments or ""
    return message, reason, deltas


@pytest.mark.parametrize(("script", "city"), [(PARIS, "Paris"), (OSLO, "Oslo")], ids=["json", "xml"])
def test_a_call_is_a_call_with_arguments_of_their_types(here: Here, script: str, city: str) -> None:
    (choice,) = ask(here, script).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": city, "days": 3 if city == "Paris" else 2}


def test_text_thoughts_and_several_calls_come_apart(here: Here) -> None:
    script = f"<think>\nI should look.\n</think>\n\nLet me see.\n{PARIS}\n{OSLO}"
    answer = ask(here, script)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Let me see.", "I should look.")
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Paris", "Oslo"]
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(
        tokenizer().encode("<think>\nI should look.\n</think>", add_special_tokens=False)
    )


def test_a_stream_names_a_call_once_and_sends_its_arguments_in_pieces(here: Here) -> None:
    message, reason, deltas = gathered(ask(here, f"Let me see.\n{PARIS}\n{OSLO}", stream=True))
    assert reason == "tool_calls"
    assert message["content"] == "Let me see."
    assert {i: json.loads(call["arguments"]) for i, call in message["calls"].items()} == {
        0: {"city": "Paris", "days": 3},
        1: {"city": "Oslo", "days": 2},
    }
    for index in (0, 1):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.type, first.function.name) == ("function", "get_weather")
        assert first.id.startswith("call_")
        assert all(delta.id is None and delta.function.name is None for delta in rest)
        assert "".join(delta.function.arguments for delta in rest) == message["calls"][index]["arguments"]
    if here[1]._burst == 1:
        assert len(deltas) > 6


def test_arguments_stream_before_the_call_is_whole() -> None:
    text = "x " * 40
    script = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + text + '"}}\n</tool_call>'
    with scripted() as here:
        _, _, deltas = gathered(ask(here, script, stream=True))
    assert len(deltas) > 20


def test_what_only_looks_like_a_call_is_content(here: Here) -> None:
    for text in ("a <tool_call> b", '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>', "1 < 2"):
        choice = ask(here, text).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (text, None)
        assert choice.finish_reason == "stop"
        message, reason, _ = gathered(ask(here, text, stream=True))
        assert (message["content"], message["calls"], reason) == (text, {}, "stop")


def test_a_call_cut_off_by_the_limit_has_the_arguments_so_far(here: Here) -> None:
    choice = ask(here, PARIS, max_tokens=len(tokenizer().encode(PARIS, add_special_tokens=False)) - 9).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.message.content) == ("get_weather", None)
    assert call.function.arguments
    assert call.function.arguments in PARIS


@pytest.mark.parametrize("script", [PARIS, OSLO], ids=["json", "xml"])
def test_a_call_that_breaks_off_is_no_reason_to_run_calls(here: Here, script: str) -> None:
    choice = ask(here, f"{PARIS}\n{script[:-35]}").choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (2, "stop")
    assert gathered(ask(here, script[:-35], stream=True))[1] == "stop"


def test_without_tools_everything_is_content(here: Here) -> None:
    assert ask(here, PARIS, tools=[]).choices[0].message.content == PARIS


def test_a_second_round_carries_calls_thoughts_and_results(here: Here) -> None:
    first = ask(here, f"<think>\nHm.\n</think>\n\n{PARIS}\n{OSLO}").choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"Sunny {i}."} for i, call in enumerate(first.tool_calls)
    ]
    answer = ask(here, "It is sunny.", messages=[*HI, first, *results])
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.choices[0].finish_reason == "stop"
    prompt = tokenizer().decode(here[1].requests[-1].prompt)
    assert "<think>\nHm.\n</think>\n\n" + PARIS in prompt
    assert '"arguments": {"city": "Oslo", "days": 2}}' in prompt
    assert prompt.count("<tool_response>") == 2
    assert prompt.index("Sunny 0.") < prompt.index("Sunny 1.")
    assert answer.generation_stats["ignored_fields"] == []


def test_arguments_may_be_an_object(here: Here) -> None:
    """As clients of mlx-lm's server send them."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"a": [1, "b"]}}}
    answer = ask(here, "Yes.", messages=[*HI, {"role": "assistant", "tool_calls": [call]}, *HI])
    assert '{"a": [1, "b"]}' in tokenizer().decode(here[1].requests[-1].prompt)
    assert answer.generation_stats["ignored_fields"] == []


@pytest.mark.parametrize("script", [PARIS, OSLO], ids=["json", "xml"])
def test_a_call_that_was_cut_off_can_be_sent_back(here: Here, script: str) -> None:
    """A stream has sent part of it by then, and what clients make of that is part of a JSON object, or nothing."""
    for most in range(8, len(tokenizer().encode(script, add_special_tokens=False)) - 1, 3):
        message, reason, deltas = gathered(ask(here, script, max_tokens=most, stream=True))
        assert reason == "length"
        calls = [{"id": deltas[0].id, "type": "function", "function": call} for call in message["calls"].values()]
        said = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
        answer = ask(here, "So be it.", messages=[*HI, said, {"role": "user", "content": "Go on."}])
        assert answer.generation_stats["ignored_fields"] == []
    prompt = tokenizer().decode(here[1].requests[-1].prompt)
    assert '"name": "get_weather", "arguments": {"city": ' in prompt


def test_arguments_come_back_whatever_is_in_them(here: Here) -> None:
    """Half a character, as models write them when they are cut off in an escape."""
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": "x\\ud83d", "b": 1}'}}
    ask(here, "Yes.", messages=[*HI, {"role": "assistant", "tool_calls": [call]}, *HI])
    assert '{"a": "x\ufffd", "b": 1}' in tokenizer().decode(here[1].requests[-1].prompt)


NAMED = {"type": "function", "function": {"name": "now"}}
CALLED = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
def test_a_call_that_must_come_is_the_only_one(here: Here, choice: Any) -> None:
    """What looks like another in the reasoning is reasoning. The token that opens calls is not permitted there."""
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "extra_body": {"enable_thinking": True}}
    bare = OSLO.removeprefix("<tool_call>\n")
    (choice,) = ask(here, f"<think>\nPerhaps {bare}\n</think>\n\n{CALLED}", **fields).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    assert (choice.message.content, choice.message.reasoning_content) == (None, f"Perhaps {bare}")
    message, reason, _ = gathered(ask(here, f"<think>\nPerhaps {bare}\n</think>\n\n{CALLED}", stream=True, **fields))
    assert ({call["name"] for call in message["calls"].values()}, reason) == ({"now"}, "tool_calls")
    with pytest.raises(openai.InternalServerError, match="no token can follow"):
        ask(here, f"<think>\n{PARIS}\n</think>\n\n{CALLED}", **fields)


def test_beside_a_shape_a_call_comes_after_the_thought(here: Here) -> None:
    fields = {"response_format": {"type": "json_object"}, "extra_body": {"enable_thinking": True}}
    (choice,) = ask(here, f"<think>\nHm.\n</think>\n\n{CALLED}", **fields).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]
    with pytest.raises(openai.InternalServerError, match="no token can follow"):
        ask(here, f"<think>\n{CALLED}\n</think>\n\n{{}}", **fields)


def test_tools_are_shown_to_the_model_unless_it_may_not_call_them(here: Here) -> None:
    ask(here, "Hello.")
    assert '"name": "get_weather"' in tokenizer().decode(here[1].requests[-1].prompt)
    ask(here, "Hello.", tool_choice="none")
    request = here[1].requests[-1]
    assert "get_weather" not in tokenizer().decode(request.prompt)
    assert request.params.logit_bias == {tokenizer().encode("<tool_call>", add_special_tokens=False)[0]: -100}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
    ({"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
      "tool_choice": "required"}, "tools[1]"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    *[({"messages": [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]},
       "messages[1].tool_calls[0].function.arguments") for text in (5, [1])],
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: json.dumps(value)[:70])
def test_what_cannot_be_called_is_refused_by_name(here: Here, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(here, "", **fields)
    here[1].scripts.clear()
    assert error.value.param == param


# The real engine, with a random model: whatever it would rather say, the grammar makes it call.
LIGHT = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def forced(server: Running, **fields: Any) -> Any:
    known = {"model": "tiny", "messages": HI, "tools": [LIGHT, CLOCK], "max_tokens": 400}
    return server.openai().chat.completions.create(**known | fields)


@pytest.mark.parametrize("k", [0, 4])
def test_a_named_tool_is_called_and_nothing_else_generated(server: Running, k: int) -> None:
    named = {"type": "function", "function": {"name": "set_light"}}
    (choice,) = forced(server, tool_choice=named, extra_body={"num_draft_tokens": k}).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "set_light"
    assert arguments.keys() == {"room", "on"}
    assert arguments["room"] in ("kitchen", "hall")
    assert isinstance(arguments["on"], bool)


def test_a_required_call_is_one_of_the_tools(server: Running) -> None:
    called = set()
    for seed in range(6):
        fields = {"temperature": 1.5, "seed": seed, "parallel_tool_calls": False}
        (choice,) = forced(server, tool_choice="required", **fields).choices
        assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
        called.add(choice.message.tool_calls[0].function.name)
    assert called == {"set_light", "clock"}


def test_a_model_may_think_before_a_call_that_must_come(server: Running) -> None:
    extra = {"enable_thinking": True, "thinking_budget": 5}
    answer = forced(server, tool_choice="required", parallel_tool_calls=False, extra_body=extra)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 5 + 3


def test_tools_of_a_model_without_any_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        monkeypatch.setitem(vars(server.served.template), "markup", Markup(None, {}))
        with pytest.raises(openai.BadRequestError) as error:
            forced(server)
    assert (error.value.param, error.value.code) == ("tools", "unsupported")
