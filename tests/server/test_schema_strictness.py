"""Schemas with keywords that no grammar can hold: what is left out is listed, and with `strict` they are refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from running import Running
from scripted import ScriptedRoom, scripted

Here = tuple[Running, ScriptedRoom]
HI = [{"role": "user", "content": "Hi"}]
OVERLAP = {"oneOf": [{"required": ["tags"]}, {"required": ["at"]}]}
LOOSE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True},
        "at": {"type": "string", "format": "iso-time"},
    },
    "required": ["tags"],
    "additionalProperties": False,
    **OVERLAP,
}
APART = {"oneOf": [{"const": 1}, {"type": "string"}]}
ENDPOINTS = {
    "/v1/chat/completions": ("response_format.json_schema", lambda each: each["choices"][0]["message"]["content"]),
    "/v1/responses": ("text.format", lambda each: each["output"][0]["content"][0]["text"]),
    "/v1/messages": ("output_config.format", lambda each: each["content"][0]["text"]),
}


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3) as server:
        yield server


def body(path: str, schema: Any, strict: bool | None) -> dict[str, Any]:
    named = {"name": "s", "schema": schema} | ({} if strict is None else {"strict": strict})
    match path:
        case "/v1/responses":
            return {"input": "Hi", "text": {"format": {"type": "json_schema", **named}}}
        case "/v1/messages":
            format = {"type": "json_schema", "schema": schema}
            return {"messages": HI, "max_tokens": 99, "output_config": {"format": format}}
    return {"messages": HI, "response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("strict", [None, False])
def test_what_cannot_be_held_is_left_out_and_listed(here: Here, path: str, strict: bool | None) -> None:
    here[1].scripts.append(said := '{"tags": ["x", "x"], "at": "noon"}')
    with here[0].http() as http:
        response = http.post(path, json=body(path, LOOSE, strict))
        assert response.status_code == 200, response.text
        answer = response.json()
        assert ENDPOINTS[path][1](answer) == said
        field = ENDPOINTS[path][0].partition(".json_schema")[0]
        left_out = {f"{field}: {word}" for word in ("uniqueItems", "format iso-time", "oneOf")}
        assert set(answer["generation_stats"]["ignored_fields"]) == left_out
        here[1].scripts.append('{"tags": ["z"]}')  # the rest of the schema holds
        assert http.post(path, json=body(path, LOOSE, strict)).status_code == 500


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("schema", "named"),
    [({"type": "array", "uniqueItems": True}, "uniqueItems"), ({"type": "string", "format": "x"}, "format: x"),
     ({"type": "object", **OVERLAP}, "oneOf")],
)  # fmt: skip
def test_strict_refuses_it_by_name(here: Here, path: str, schema: Any, named: str) -> None:
    with here[0].http() as http:
        response = http.post(path, json=body(path, schema, True))
        assert (response.status_code, response.json()["error"]["param"]) == (
            400,
            ENDPOINTS[path][0].split(".json_")[0],
        )
        assert named in response.json()["error"]["message"]


@pytest.mark.parametrize("strict", [True, False])
def test_branches_that_exclude_one_another_are_nothing_left_out(here: Here, strict: bool) -> None:
    here[1].scripts.append('"a"')
    with here[0].http() as http:
        answer = http.post("/v1/chat/completions", json=body("/v1/chat/completions", APART, strict)).json()
    assert answer["generation_stats"]["ignored_fields"] == []


def test_a_forced_call_and_reasoning_before_an_answer_say_it_too(here: Here) -> None:
    call = "<tool_call>\n" + json.dumps({"name": "f", "arguments": {"tags": ["x"]}}) + "\n</tool_call>"
    here[1].scripts.append(call)
    tools = [{"type": "function", "function": {"name": "f", "parameters": LOOSE}}]
    with here[0].http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": HI, "tools": tools, "tool_choice": "required"})
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls", answer.text
        assert "tools: uniqueItems" in answer.json()["generation_stats"]["ignored_fields"]
        here[1].scripts.append('<think>\nSo.\n</think>\n\n{"tags": []}')
        thinking = body("/v1/chat/completions", LOOSE, None) | {"enable_thinking": True}
        answer = http.post("/v1/chat/completions", json=thinking)
        assert "response_format: uniqueItems" in answer.json()["generation_stats"]["ignored_fields"], answer.text
