"""OpenAI's Responses API with its own client: whole and streamed, tools, reasoning, history and refusals."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from running import Running, running, tokenizer
from scripted import ScriptedRoom, scripted

Here = tuple[Running, ScriptedRoom]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
HELLO: Any = [{"role": "user", "content": "Hello"}]
BUILT_IN = [
    "web_search",
    "file_search",
    "computer_use_preview",
    "code_interpreter",
    "mcp",
    "image_generation",
    "custom",
]


class Sky(BaseModel):
    colour: Literal["grey", "blue"]


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3, key="first", other_keys=("second",)) as server:
        yield server


def say(here: Here, *scripts: str) -> openai.OpenAI:
    here[1].scripts.extend(scripts)
    return here[0].openai()


def prompt(here: Here) -> str:
    return str(tokenizer().decode(list(here[1].requests[-1].prompt)))


def refused(call: Any, **fields: Any) -> dict[str, Any]:
    with pytest.raises(openai.BadRequestError) as error:
        call(**{"model": "tiny", "input": "Hello"} | fields)
    return dict(error.value.body)  # type: ignore[call-overload]


def test_a_response_has_its_text_usage_and_statistics(here: Here) -> None:
    client = say(here, "Hello there.")
    response = client.responses.create(
        model="tiny", instructions="Be brief.", input="Hello", metadata={"a": "b"}, max_output_tokens=50
    )
    assert (response.output_text, response.status, response.model) == ("Hello there.", "completed", "tiny")
    assert (response.metadata, response.max_output_tokens, response.instructions) == ({"a": "b"}, 50, "Be brief.")
    assert response.usage is not None
    assert response.usage.input_tokens == len(here[1].requests[-1].prompt)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.to_dict()["generation_stats"]["rounds"] > 0  # type: ignore[index]
    assert here[1].requests[-1].params.max_tokens == 50
    assert prompt(here).index("Be brief.") < prompt(here).index("Hello")


def test_the_typed_events_of_a_stream(here: Here) -> None:
    client = say(here, f"Let me look.\n\n{CALL}")
    events = list(client.responses.create(model="tiny", input="Oslo?", tools=[WEATHER], stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    order = list(dict.fromkeys(kinds))
    assert order == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "function_call_arguments.delta", "function_call_arguments.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert [item.type for item in last.response.output] == ["message", "function_call"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text == "Let me look."
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(arguments)) == {"city": "Oslo"}
    assert last.response.to_dict()["generation_stats"]["rounds"] > 0


def test_the_clients_own_accumulation_agrees_with_the_last_event(here: Here) -> None:
    client = say(here, f"Let me look.\n\n{CALL}\n{CALL}")
    with client.responses.stream(model="tiny", input="Oslo?", tools=[WEATHER]) as stream:
        snapshots = [event for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1].snapshot == final.output_text == "Let me look."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Oslo"}] * 2
    assert len({call.call_id for call in calls}) == 2


@pytest.mark.parametrize("continued", [True, False], ids=["previous_response_id", "items"])
def test_a_tool_round(here: Here, continued: bool) -> None:
    client = say(here, f"<think>\nThe tool knows.\n</think>\n\n{CALL}", "It rains.")
    first = client.responses.create(model="tiny", input="Oslo?", tools=[WEATHER], store=continued)
    reasoning, call = first.output
    assert reasoning.to_dict()["content"] == [{"type": "reasoning_text", "text": "The tool knows."}]
    assert call.type == "function_call"
    assert call.name == "weather"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    if continued:
        second = client.responses.create(model="tiny", previous_response_id=first.id, input=[result], tools=[WEATHER])
    else:
        history: Any = [{"role": "user", "content": "Oslo?"}, *(item.to_dict() for item in first.output), result]
        second = client.responses.create(model="tiny", input=history, tools=[WEATHER])
    assert second.output_text == "It rains."
    assert second.to_dict()["generation_stats"]["ignored_fields"] == []  # type: ignore[index]
    text = prompt(here)
    places = [text.index(part) for part in ("Oslo?", "The tool knows.", '"name": "weather", "arguments"', "rain")]
    assert places == sorted(places)
    assert text.count("<|im_start|>assistant") == 2, "the items of a turn are one message"


def test_functions_in_a_namespace_are_called_in_it(here: Here) -> None:
    client = say(here, CALL.replace("weather", "sky.weather"), "It rains.")
    tools: Any = [{"type": "namespace", "name": "sky", "description": "Above.", "tools": [WEATHER]}]
    question: Any = {"role": "user", "content": "Oslo?"}
    (call,) = client.responses.create(model="tiny", input=[question], tools=tools).output
    assert (call.to_dict()["name"], call.to_dict()["namespace"]) == ("weather", "sky")
    result: Any = {"type": "function_call_output", "call_id": call.to_dict()["call_id"], "output": "rain"}
    client.responses.create(model="tiny", input=[question, call.to_dict(), result], tools=tools)
    assert prompt(here).count("sky.weather") == 2
    nested: Any = [tools[0] | {"tools": [{"type": "web_search"}]}]
    assert "'web_search'" in refused(client.responses.create, tools=nested)["message"]


def test_reasoning_as_a_summary_and_sealed(here: Here) -> None:
    client = say(here, "<think>\nThe tool knows.\n</think>\n\n" + CALL, "It rains.")
    events = list(
        client.responses.create(
            model="tiny", input="Oslo?", tools=[WEATHER], stream=True, store=False,
            reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"],
        )
    )  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "The tool knows."
    assert not [event for event in events if event.type.startswith("response.reasoning_text")]
    done: Any = events[-1]
    reasoning, call = done.response.output
    assert (reasoning.summary[0].text, reasoning.content) == ("The tool knows.", None)
    sealed: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": reasoning.encrypted_content}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    client.responses.create(
        model="tiny", input=["Oslo?" and {"role": "user", "content": "Oslo?"}, sealed, call, result]
    )
    assert "The tool knows." in prompt(here)


@pytest.mark.parametrize("sealed", ["gAAAAA", "headstart:%%%", "headstart:/w=="])
def test_reasoning_that_cannot_be_read_is_left_out(here: Here, sealed: str) -> None:
    client = say(here, "Yes.")
    items: Any = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    ]
    assert client.responses.create(model="tiny", input=items).output_text == "Yes."
    assert prompt(here).count("<|im_start|>") == 2


def test_a_response_that_reaches_its_limit_is_incomplete(here: Here) -> None:
    client = say(here, "one two three four five", "one two three four five")
    response = client.responses.create(model="tiny", input="Hello", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.to_dict()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response.output[-1].status == "incomplete"  # type: ignore[union-attr]
    *_, last = client.responses.create(model="tiny", input="Hello", max_output_tokens=2, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.status == "incomplete"


def test_a_cancelled_stream_is_not_completed() -> None:
    with running() as server, server.http() as http:
        options = {"max_output_tokens": 3000, "stream": True, "extra_body": {"min_tokens": 3000}}
        stream = server.openai().responses.create(model="tiny", input="Hello", **options)
        first = next(stream)
        assert http.post(f"/v1/requests/{first.response.id}/cancel").status_code == 200
        *_, last = stream
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")


def test_a_response_follows_a_schema(here: Here) -> None:
    client = say(here, '{"colour": "blue"}', '{"a": 1}', "{}")
    assert client.responses.parse(model="tiny", input="The sky?", text_format=Sky).output_parsed == Sky(colour="blue")
    text: Any = {"format": {"type": "json_object"}}
    assert json.loads(client.responses.create(model="tiny", input="Any?", text=text).output_text) == {"a": 1}
    with pytest.raises(openai.APIError):  # the script breaks the schema, which the grammar does not let pass
        client.responses.parse(model="tiny", input="The sky?", text_format=Sky)


def test_a_call_can_be_required_or_ruled_out(here: Here) -> None:
    client = say(here, CALL, "No.")
    choice: Any = {"type": "function", "name": "weather"}
    response = client.responses.create(model="tiny", input="Oslo?", tools=[WEATHER], tool_choice=choice)
    assert [item.type for item in response.output] == ["function_call"]
    assert here[1].requests[-1].params.grammar is not None
    client.responses.create(model="tiny", input="Oslo?", tools=[WEATHER], tool_choice="none")
    assert "weather" not in prompt(here)


def test_a_failure_in_a_stream_is_an_event(here: Here) -> None:
    client = say(here, "not JSON")
    text: Any = {"format": {"type": "json_object"}}
    *_, last = client.responses.create(model="tiny", input="Any?", text=text, stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_stored_responses_are_read_and_deleted_by_their_owner_alone(here: Here) -> None:
    client = say(here, "Hello there.")
    other = here[0].openai().with_options(api_key="second")
    made = client.responses.create(model="tiny", input="Hello")
    assert client.responses.retrieve(made.id) == made
    for stranger_call in (other.responses.retrieve, other.responses.delete):
        with pytest.raises(openai.NotFoundError, match="is stored"):
            stranger_call(made.id)
    assert refused(other.responses.create, previous_response_id=made.id)["code"] == "previous_response_not_found"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    gone = refused(client.responses.create, previous_response_id=made.id)
    assert (gone["code"], gone["param"]) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_to_be_stored_is_not(here: Here) -> None:
    client = say(here, "Hello there.")
    made = client.responses.create(model="tiny", input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_instructions_are_not_carried_over(here: Here) -> None:
    client = say(here, "One.", "Two.")
    first = client.responses.create(model="tiny", input="Hello", instructions="Be brief.")
    client.responses.create(model="tiny", input="Again", previous_response_id=first.id)
    assert "Be brief." not in prompt(here)
    assert "One." in prompt(here)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_built_in_tools_are_refused_by_name(here: Here, kind: str) -> None:
    error = refused(here[0].openai().responses.create, tools=[{"type": kind, "name": "x"}])
    assert (error["param"], repr(kind) in error["message"]) == ("tools[0]", True)


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0]", "'computer_call'"),
        (
            {"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]},
            "input[1]",
            "reference",
        ),
        ({"input": [{"id": "x"}]}, "input[0]", "None"),
        ({"input": [5]}, "input[0]", "None"),
        ({"input": []}, "input", "no messages: send at least one"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None, "image"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role", "role"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "call_id"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"extra_body": {"background": True}}, "background", "not supported"),
        ({"extra_body": {"conversation": "conv_1"}}, "conversation", "not supported"),
        ({"extra_body": {"top_n_sigma": -1}}, "top_n_sigma", "from 0"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "16"),
        ({"input": "word " * 5000}, "input", "too long"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(here: Here, fields: Any, param: str | None, named: str) -> None:
    error = refused(here[0].openai().responses.create, **fields)
    assert named in error["message"]
    assert param is None or error["param"] == param


def test_the_oldest_turns_are_left_out_on_request(here: Here) -> None:
    client = say(here, "Yes.")
    turns: Any = [{"role": "user", "content": f"turn {i} " + "word " * 400} for i in range(20)]
    items: Any = [{"role": "developer", "content": "Be brief."}, *turns]
    assert "too long" in refused(client.responses.create, input=items)["message"]
    response = client.responses.create(model="tiny", input=items, truncation="auto", max_output_tokens=500)
    text, length = prompt(here), len(here[1].requests[-1].prompt)
    assert [part in text for part in ("Be brief.", "turn 19 ", "turn 0 ")] == [True, True, False]
    assert length <= 4096 - 500 < length + 4096 // 4 + 450, "about a quarter of the context more than it takes"
    assert response.truncation == "auto"


def test_a_real_model_generates_the_same_as_in_a_chat() -> None:
    with running() as here:
        client = here.openai()
        chat = client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=20, temperature=0)
        response: Response = client.responses.create(model="tiny", input="Hello", max_output_tokens=20, temperature=0)
        assert response.output_text == chat.choices[0].message.content
        sampled: Any = {"model": "tiny", "temperature": 1.0, "extra_body": {"seed": 3, "top_n_sigma": 1}}
        chat = client.chat.completions.create(**sampled, messages=HELLO, max_completion_tokens=20)
        response = client.responses.create(**sampled, input="Hello", max_output_tokens=20)
        assert response.output_text == chat.choices[0].message.content
        assert here.metric("headstart_requests_total", endpoint="/v1/responses", outcome="length") == 2
