"""langchain-openai against a running server: chat, streams, tools over two rounds, structured output, errors."""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from running import Running, alone, chat_tokens, tokenizer
from scripted import ScriptedRoom, scripted

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


class Cat(BaseModel):
    """A cat."""

    colour: Literal["black", "white"]
    tame: bool


def model(server: Running, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI  # takes a second, of the one worker that uses it

    known = {"model": "tiny", "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
    return ChatOpenAI(**{"temperature": 0, "max_tokens": 24} | known | options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Running, ScriptedRoom]]:
    with scripted(burst=3) as server:
        yield server


def test_a_chat_is_what_the_engine_generates_alone(server: Running) -> None:
    answer = model(server).invoke("hi")
    assert answer.content == alone(chat_tokens("hi"), max_tokens=24).text
    assert answer.usage_metadata["output_tokens"] == 24
    assert answer.response_metadata["finish_reason"] == "length"


def test_a_stream_has_the_same_text(server: Running) -> None:
    chunks = list(model(server, stream_usage=True).stream("hi"))
    assert len(chunks) > 4
    whole = sum(chunks[1:], chunks[0])
    assert whole.content == alone(chat_tokens("hi"), max_tokens=24).text
    assert whole.usage_metadata["output_tokens"] == 24


@pytest.mark.parametrize("stream", [False, True])
def test_tools_over_two_rounds(here: tuple[Running, ScriptedRoom], stream: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    running, room = here
    room.scripts.extend([f"<think>\nHm.\n</think>\n\n{CALL}", "It is 5."])
    bound = model(running, streaming=stream, max_tokens=200).bind_tools([add])
    messages: list[Any] = [HumanMessage("2 + 3?")]
    messages.append(bound.invoke(messages))
    (call,) = messages[-1].tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
    result = tool(add).invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*messages, result]).content == "It is 5."
    prompt = tokenizer().decode(room.requests[-1].prompt)
    assert CALL in prompt
    assert "<tool_response>\n5\n</tool_response>" in prompt


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(server: Running, method: str) -> None:
    structured = model(server, max_tokens=300).with_structured_output(Cat, method=method)
    assert isinstance(structured.invoke("Describe a cat."), Cat)


def test_log_probabilities(server: Running) -> None:
    told = model(server).bind(logprobs=True, top_logprobs=2).invoke("hi").response_metadata["logprobs"]["content"]
    assert len(told) == 24
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)


def test_errors_are_typed(server: Running) -> None:
    with pytest.raises(openai.NotFoundError):
        model(server, model="gpt-4o").invoke("hi")
    with pytest.raises(openai.BadRequestError) as error:
        model(server).invoke("long " * 5000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as error:
        model(server).bind_tools([add], tool_choice="subtract").invoke("hi")
    assert error.value.param == "tool_choice"
