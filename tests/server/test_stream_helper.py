"""`client.chat.completions.stream()`, the openai client's own way through a stream: events, and their sum."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from running import Running, alone, chat_tokens
from scripted import ScriptedRoom, scripted

from headstart.server.response import TokenSpan

HI = [{"role": "user", "content": "hi"}]
Here = tuple[Running, ScriptedRoom]


class Cat(BaseModel):
    colour: Literal["black", "white"]
    tame: bool


class Feed(BaseModel):
    """Feed the cat."""

    food: str
    grams: int


FEED = openai.pydantic_function_tool(Feed)
CALL = '<tool_call>\n{"name": "Feed", "arguments": {"food": "%s", "grams": %d}}\n</tool_call>'
SCRIPT = f"<think>\nHm.\n</think>\n\nI feed it.\n{CALL % ('fish', 50)}\n{CALL % ('milk', 20)}"


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3) as server:
        yield server


def streamed(server: Running, **fields: Any) -> tuple[list[Any], Any]:
    """The events, and the completion at the end, which the client does not give out where a limit has cut it off."""
    with server.openai().chat.completions.stream(**{"model": "tiny", "messages": HI, **fields}) as stream:
        return list(stream), stream.get_final_completion()


def test_a_chat_is_what_the_engine_generates_alone(server: Running) -> None:
    text = alone(chat_tokens("hi"), max_tokens=24).text
    stop = text[-6:]
    fields = {"stop": stop, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    events, completion = streamed(server, **fields)
    expected = text[: text.find(stop)]
    assert "".join(event.delta for event in events if event.type == "content.delta") == expected
    (choice,) = completion.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (expected, "assistant", "stop")
    assert 5 < len(choice.logprobs.content) == completion.usage.completion_tokens
    assert [event.type for event in events].count("content.done") == 1


def test_several_answers_are_kept_apart(server: Running) -> None:
    fields: dict[str, Any] = {"max_tokens": 200, "n": 3, "temperature": 1.0, "seed": 5, "stop": ["e"]}
    _, completion = streamed(server, **fields)
    whole = server.openai().chat.completions.create(model="tiny", messages=HI, **fields)  # type: ignore[call-overload]
    said = [[choice.message.content for choice in each.choices] for each in (completion, whole)]
    assert said[0] == said[1]
    assert len(set(said[0])) == 3


@pytest.mark.parametrize("k", [0, 3])
def test_a_shape_is_parsed(server: Running, k: int) -> None:
    _, completion = streamed(server, response_format=Cat, max_tokens=100, extra_body={"num_draft_tokens": k})
    assert isinstance(completion.choices[0].message.parsed, Cat)


def test_calls_are_parsed_as_they_come(here: Here) -> None:
    here[1].scripts.append(SCRIPT)
    events, completion = streamed(here[0], tools=[FEED])
    (choice,) = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I feed it.")
    assert choice.message.reasoning_content == "Hm."
    parsed = [call.function.parsed_arguments for call in choice.message.tool_calls]
    assert parsed == [Feed(food="fish", grams=50), Feed(food="milk", grams=20)]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name, event.parsed_arguments) for event in done] == [
        (0, "Feed", parsed[0]),
        (1, "Feed", parsed[1]),
    ]
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > 4
    assert "".join(event.arguments_delta for event in pieces if event.index == 0) == '{"food": "fish", "grams": 50}'


def test_an_answer_goes_into_the_next_turn(here: Here) -> None:
    """As it is: the client's own message, with all that it adds to it."""
    here[1].scripts.extend([SCRIPT, "It has eaten."])
    _, completion = streamed(here[0], tools=[FEED])
    message = completion.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls]
    _, second = streamed(here[0], tools=[FEED], messages=[*HI, message, *results])
    assert second.choices[0].message.content == "It has eaten."
    prompt = here[0].served.tokenizer.decode(here[1].requests[-1].prompt)
    assert SCRIPT in prompt
    assert prompt.count("<tool_response>\ndone\n</tool_response>") == 2


def test_an_answer_that_is_cut_off_is_an_error_where_it_was_to_be_parsed(here: Here) -> None:
    here[1].scripts.append(SCRIPT)
    with pytest.raises(openai.LengthFinishReasonError):
        streamed(here[0], tools=[FEED], max_tokens=20)


def test_the_asynchronous_client_receives_the_same(here: Here) -> None:
    here[1].scripts.append(SCRIPT)

    async def ask() -> Any:
        client = here[0].async_openai()
        async with client.chat.completions.stream(model="tiny", messages=HI, tools=[FEED]) as stream:  # type: ignore[arg-type]
            return await stream.get_final_completion()

    (choice,) = asyncio.run(ask()).choices
    assert [call.function.parsed_arguments.grams for call in choice.message.tool_calls] == [50, 20]


def test_events_that_wait_to_be_sent_are_joined_once(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that needs its end, of as many tokens as it likes: not all of them again with every round."""
    touched, join = 0, TokenSpan.join

    def counted(spans: list[TokenSpan]) -> TokenSpan:
        nonlocal touched
        touched += sum(len(span.tokens) for span in spans)
        return join(spans)

    monkeypatch.setattr(TokenSpan, "join", counted)
    numbers = ", ".join(map(str, range(200)))
    here[1].scripts.append(f"<function=sum>\n<parameter=numbers>\n[{numbers}]\n</parameter>\n</function>")
    schema = {"type": "object", "properties": {"numbers": {"type": "array"}}}
    tools = [{"type": "function", "function": {"name": "sum", "parameters": schema}}]
    client = here[0].openai()
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, tools=tools, stream=True))  # type: ignore[call-overload]
    assert any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    said = len(here[0].served.tokenizer.encode(numbers, add_special_tokens=False))
    assert said < touched < 3 * said
