"""Schemas of tools that are invalid or hard to process: rejected by name or handled quickly, never a crash."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from running import Running
from scripted import ScriptedRoom, scripted

HI = [{"role": "user", "content": "hi"}]
Here = tuple[Running, ScriptedRoom]
FLAWS: list[Any] = [
    {"required": True}, {"required": ["a", 5]}, {"type": 5}, {"type": [["object"]]}, {"anyOf": 5},
    {"oneOf": {"type": "object"}}, {"enum": 5}, {"$ref": 5}, {"properties": ["a"]}, {"properties": {"a": 5}},
    {"properties": {"a": {"anyOf": [{"type": {}}]}}}, {"$defs": {"a": {"enum": "x"}}},
]  # fmt: skip
FLAWLESS: list[Any] = [
    None, {}, {"type": "object", "properties": None, "required": None},
    {"type": "object", "properties": {"a": True, "b": {"type": ["string", "null"]}, "c": {"type": "any"}}},
    {"type": "object", "properties": {"a": {"type": "string", "required": True}}},  # as drafts had it once
]  # fmt: skip


@pytest.fixture(scope="module", params=["json", "xml"])
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    """With a model that writes calls in this way."""
    with scripted() as server:
        template = server[0].served.template
        vars(template)["markup"] = replace(template.markup, style=request.param)
        yield server


def ask(here: Here, schema: Any, **fields: Any) -> Any:
    functions = [{"name": "f0"}, {"name": "f1", "parameters": schema}]
    tools = [{"type": "function", "function": function} for function in functions]
    known = {"model": "tiny", "messages": HI, "tools": tools}
    return here[0].openai().chat.completions.create(**known | fields)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("schema", FLAWS, ids=lambda value: json.dumps(value)[:50])
def test_what_is_no_schema_is_refused_or_read_as_any(here: Here, schema: Any, choice: Any) -> None:
    xml = "<tool_call>\n<function=f1>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    as_json = '<tool_call>\n{"name": "f1", "arguments": {"a": 5}}\n</tool_call>'
    here[1].scripts.append(xml if here[0].served.template.markup.style == "xml" else as_json)
    refused = ""
    try:
        (answer,) = ask(here, schema, tool_choice=choice).choices
    except openai.BadRequestError as error:
        refused = str(error.param)
        here[1].scripts.clear()
    assert refused == "tools[1]" if refused else answer.message.tool_calls
    assert not refused or choice == "required"


@pytest.mark.parametrize("schema", FLAWLESS, ids=lambda value: json.dumps(value)[:50])
def test_what_can_be_read_is_not_refused(here: Here, schema: Any) -> None:
    call = "<tool_call>\n<function=f1>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    here[1].scripts.append(call)
    (choice,) = ask(here, schema).choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": "5"}


def nested(levels: int) -> Any:
    return {"type": "object", "properties": {"a": nested(levels - 1)}} if levels else {}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(90)}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(90)}}},
        {"chat_template_kwargs": {"a": nested(90)}},
    ],
    ids=["tools", "response_format", "chat_template_kwargs"],
)
def test_what_cannot_be_passed_on_is_refused_by_name(here: Here, fields: dict[str, Any]) -> None:
    body = json.dumps({"messages": HI, **fields})
    with here[0].http() as http:
        response = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(next(iter(fields)))


@pytest.mark.parametrize("value", [nested(150), {"description": "\ud800"}], ids=["deep", "half a character"])
def test_what_is_no_ordinary_json_is_refused_by_its_place(here: Here, value: Any) -> None:
    body = json.dumps({"messages": HI, "chat_template_kwargs": value})
    with here[0].http() as http:
        response = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert re.search(r"not JSON: .* at line 1 column \d+", response.json()["error"]["message"])


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_with_2_to_the_30_ways_through_it_is_read_at_once(here: Here, choice: Any) -> None:
    ways = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 2} for i in range(30)}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/D0"}},
        "$defs": {**ways, "D30": {"type": "integer"}},
    }
    xml = "<tool_call>\n<function=f1>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    as_json = '<tool_call>\n{"name": "f1", "arguments": {"a": 5}}\n</tool_call>'
    here[1].scripts.append(xml if here[0].served.template.markup.style == "xml" else as_json)
    (answer,) = ask(here, schema, tool_choice=choice).choices
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"a": 5}
