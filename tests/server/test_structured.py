"""Structured output through the real engine with a random model and drafts."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from running import Running
from scripted import ScriptedRoom, scripted

HI = [{"role": "user", "content": "Describe a cat."}]
DEPTHS = pytest.mark.parametrize("k", [0, 4])


class Cat(BaseModel):
    colour: Literal["black", "white"]
    legs: Literal[3, 4]
    tame: bool


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["black", "white"]}, "tame": {"type": "boolean"}},
    "required": ["colour", "tame"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "cat", "schema": SCHEMA, "strict": True}}


def ask(server: Running, **fields: Any) -> Any:
    extra = fields.pop("extra_body", {})
    known = {"model": "tiny", "messages": HI, "max_tokens": 300}
    return server.openai().chat.completions.create(**known | fields, extra_body=extra)


@DEPTHS
def test_parse_gives_the_object_that_was_asked_for(server: Running, k: int) -> None:
    completion = server.openai().chat.completions.parse(
        model="tiny", messages=HI, response_format=Cat, max_tokens=300, extra_body={"num_draft_tokens": k}
    )
    assert isinstance(completion.choices[0].message.parsed, Cat)
    assert completion.choices[0].finish_reason == "stop"


@DEPTHS
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_schema_holds_at_any_temperature(server: Running, k: int, seed: int) -> None:
    extra = {"num_draft_tokens": k, "top_k": 0}
    answer = ask(server, response_format=FORMAT, temperature=1.5, seed=seed, extra_body=extra)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert (answer.generation_stats["proposed_draft_tokens"] > 0) == (k > 0)


def test_a_stream_of_it_is_the_same(server: Running) -> None:
    chunks = ask(server, response_format=FORMAT, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == ask(server, response_format=FORMAT).choices[0].message.content


@DEPTHS
def test_any_object_will_do(server: Running, k: int) -> None:
    """It need not come to an end: a random model has no reason to close a bracket."""
    answer = ask(server, response_format={"type": "json_object"}, max_tokens=20, extra_body={"num_draft_tokens": k})
    assert answer.choices[0].message.content.startswith("{")


@DEPTHS
def test_expressions_and_grammars_hold_in_chats_and_completions(server: Running, k: int) -> None:
    for extra in ({"guided_regex": "(yes|no), [0-9]{3}"}, {"grammar": 'start: ("yes" | "no") ", " /[0-9]{3}/'}):
        extra |= {"num_draft_tokens": k}
        chat = ask(server, extra_body=extra).choices[0].message.content
        completion = server.openai().completions.create(
            model="tiny", prompt="Well, ", max_tokens=50, extra_body=extra
        )
        for text in (chat, completion.choices[0].text):
            assert text[:-3] in ("yes, ", "no, ")
            assert text[-3:].isdecimal()


@DEPTHS
def test_a_model_thinks_first_and_then_keeps_to_the_shape(server: Running, k: int) -> None:
    extra = {"enable_thinking": True, "thinking_budget": 6, "num_draft_tokens": k}
    think = server.served.tokenizer.encode("<think>", add_special_tokens=False)[0]
    answer = ask(server, response_format=FORMAT, logit_bias={str(think): 100}, extra_body=extra)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 6 + 2
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}},
     "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://a.example/b"}}}},
     "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"grammar": "start: nothing"}, "grammar"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: json.dumps(value)[:70])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_shape_that_cannot_be_kept_to_is_refused_by_name(
    server: Running, fields: dict[str, Any], param: str, thinking: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(server, extra_body=fields | {"enable_thinking": thinking})
    assert error.value.param == param
    assert param.split(".")[0] in error.value.message


def test_a_schema_that_holds_no_number_where_it_should_is_refused_by_name(server: Running) -> None:
    """Python's JSON has NaN, and its clients may send it."""
    wrong = {"minimum": float("nan")}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    shaped = {"response_format": {"type": "json_schema", "json_schema": {"schema": wrong}}}
    with server.http() as http:
        for route, fields, param in (
            ("chat/completions", shaped, "response_format"),
            ("messages", {"output_config": {"format": {"type": "json_schema", "schema": wrong}}}, "output_config"),
        ):
            body = json.dumps(chat | fields)
            response = http.post(f"/v1/{route}", content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith(param)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
Here = tuple[Running, ScriptedRoom]


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted() as server:
        yield server


@pytest.mark.parametrize(
    ("script", "permitted"),
    [
        ('{"colour": "black", "tame": true}', True),
        ('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', True),
        ("A black one.", False),
    ],
)
def test_beside_tools_an_answer_is_a_call_or_has_the_shape(here: Here, script: str, permitted: bool) -> None:
    here[1].scripts.append(script)
    if not permitted:
        with pytest.raises(openai.InternalServerError, match="no token can follow"):
            ask(here[0], response_format=FORMAT, tools=[TOOL])
        return
    choice = ask(here[0], response_format=FORMAT, tools=[TOOL]).choices[0]
    assert (choice.finish_reason == "tool_calls") == script.startswith("<")
    assert (choice.message.content == script) != script.startswith("<")
