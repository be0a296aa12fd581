"""The fields that Open Responses requires of a response, whatever was requested."""

from collections.abc import Iterator
from types import NoneType
from typing import Any

import pytest
from running import Running
from scripted import ScriptedRoom, scripted

Here = tuple[Running, ScriptedRoom]
REQUIRED: dict[str, Any] = {
    "id": str, "object": str, "created_at": int, "completed_at": int | NoneType, "status": str,
    "incomplete_details": dict | NoneType, "model": str, "previous_response_id": str | NoneType,
    "instructions": str | NoneType, "output": list, "error": dict | NoneType, "tools": list,
    "tool_choice": str | dict, "truncation": str,
    "parallel_tool_calls": bool, "text": dict, "top_p": float, "presence_penalty": float,
    "frequency_penalty": float, "top_logprobs": int, "temperature": float, "reasoning": dict | NoneType,
    "usage": dict | NoneType, "max_output_tokens": int | NoneType, "max_tool_calls": int | NoneType, "store": bool,
    "background": bool, "service_tier": str, "metadata": dict, "safety_identifier": str | NoneType,
    "prompt_cache_key": str | NoneType,
}  # fmt: skip
FULL: dict[str, Any] = {
    "max_tool_calls": 3, "safety_identifier": "u1", "prompt_cache_key": "p1", "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "temperature": 0.2, "top_p": 0.9, "metadata": {"a": "b"}, "store": False,
    "parallel_tool_calls": False, "tool_choice": "auto",
}  # fmt: skip


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with scripted(burst=3) as server:
        yield server


def create(here: Here, **fields: Any) -> dict[str, Any]:
    here[1].scripts.append('{"a": 1}')
    with here[0].http() as http:
        response = http.post("/v1/responses", json={"input": "Hello"} | fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("fields", [{}, FULL, dict.fromkeys(FULL)], ids=["none", "all", "null"])
def test_every_field_is_there(here: Here, fields: dict[str, Any]) -> None:
    response = create(here, **fields)
    wrong = [name for name, kind in REQUIRED.items() if not isinstance(response.get(name, ...), kind)]
    assert not wrong
    assert response["completed_at"] >= response["created_at"]
    given = {name: value for name, value in fields.items() if value is not None}
    assert {name: response[name] for name in given} == given
    assert response["generation_stats"]["ignored_fields"] == []


def test_penalties_reach_the_sampler(here: Here) -> None:
    create(here, **FULL)
    params = here[1].requests[-1].params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)


def test_nested_fields_are_there_too(here: Here) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "schema": schema}}
    response = create(here, tools=[{"type": "function", "name": "f"}], text=text)
    function = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    assert response["tools"] == [function]
    shown = {"type": "json_schema", "name": "response", "description": None, "schema": schema, "strict": False}
    assert response["text"] == {"format": shown}
