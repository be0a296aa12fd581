"""Turning speculation off changes no byte of a greedy or seeded answer, by whichever route it was asked for and
whatever else was asked of it. A stream is cut where rounds end, and adds up to the same."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from running import Running

CHAT, COMPLETION, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ARGUMENTS = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "hall"]}, "note": {"type": "string", "maxLength": 20}},
    "required": ["room", "note"],
}
LIGHT = {"type": "function", "function": {"name": "set_light", "parameters": ARGUMENTS}}
CALL = {"tools": [LIGHT], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120}
NAMED = {**CALL, "tool_choice": {"type": "function", "function": {"name": "set_light"}}}
THINKING = {"enable_thinking": True, "thinking_budget": 8, "logit_bias": {"8188": 100}}  # the token that opens one
SHAPE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"schema": SHAPE}}}
SEEDED = {"temperature": 1.0, "seed": 11, "top_p": 0.9}
SWITCH = {"tools": [{"name": "set_light", "input_schema": ARGUMENTS}], "max_tokens": 120}
HOT = {"temperature": 2.0, "seed": 3}
ASKED: dict[str, dict[str, dict[str, Any]]] = {
    CHAT: {
        "plain": {},
        "seeded": SEEDED,
        "several": {"n": 3, **SEEDED},
        "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, **SEEDED},
        "logprobs": {"logprobs": True, "top_logprobs": 3, **SEEDED},
        "stop": {"stop": ["e"], **SEEDED},
        "tools": {"tools": [LIGHT]},
        "call": CALL,
        "seeded call": {**CALL, **SEEDED},
        "named call": {**NAMED, **SEEDED},
        "shape": {**FORMAT, **SEEDED},
        "thinking": {**THINKING, **SEEDED},
        "thinking and shape": {**THINKING, **FORMAT},
        "thinking and call": {**THINKING, **CALL, **SEEDED},
    },
    COMPLETION: {
        "plain": {},
        "seeded": SEEDED,
        "several": {"n": 3, **SEEDED},
        "logprobs": {"logprobs": 3, **SEEDED},
        "stop": {"stop": ["e"], **SEEDED},
        "several and logprobs": {"logprobs": 2, "n": 2, **SEEDED},
        "regex": {"guided_regex": "[a-z]{5,30}, [0-9]+", **SEEDED},
    },
    MESSAGES: {
        "plain": {},
        "seeded": HOT,
        "call": {**SWITCH, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        "named call": {**SWITCH, "tool_choice": {"type": "tool", "name": "set_light"}, **HOT},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 8}, "stop_sequences": ["e"]},
        "shape": {"output_config": {"format": {"type": "json_schema", "schema": SHAPE}}, **HOT},
    },
}
PROMPTS = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me of cats."}], "max_tokens": 30},
    COMPLETION: {"prompt": "def add(a, b):", "max_tokens": 24},
    MESSAGES: {"messages": [{"role": "user", "content": "Tell me of cats."}], "max_tokens": 50},
}
OFTEN = {  # what every route adds to an answer, once; the others are slow tests
    CHAT: ("several", "logprobs", "seeded call"),
    COMPLETION: ("stop", "regex"),
    MESSAGES: ("thinking", "shape"),
}
ALL = [
    pytest.param(
        route,
        fields,
        id=f"{route.rpartition('v1/')[2]}: {name}",
        marks=[] if name in OFTEN[route] else pytest.mark.slow,
    )
    for route, asked in ASKED.items()
    for name, fields in asked.items()
]
EVERY_REQUEST = pytest.mark.parametrize(("route", "fields"), ALL)


@pytest.fixture
def without(server: Running) -> Iterator[Running]:
    """The server with speculation turned off."""
    server.room.configure(speculation=False)
    yield server
    server.room.configure(speculation=True)


def post(server: Running, route: str, fields: dict[str, Any]) -> str:
    with server.http() as http:
        response = http.post(route, json=PROMPTS[route] | fields)
    assert response.status_code == 200, response.text
    return re.sub(r"\b(msg|toolu|call|chatcmpl|cmpl)[_-][0-9a-f]{24,}", r"\1", response.text)


def whole(server: Running, route: str, fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """An answer without what is new every time, and how many tokens were drafted for it."""
    body: dict[str, Any] = json.loads(post(server, route, fields))
    stats = body.pop("generation_stats")
    assert stats["exact"]
    body.pop("created", None)
    body.pop("timings", None)
    _forget_drafts(body["usage"])
    return body, stats["proposed_draft_tokens"]


def _forget_drafts(usage: dict[str, Any]) -> None:
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        usage.get("completion_tokens_details", {}).pop(name, None)


def streamed(server: Running, route: str, fields: dict[str, Any]) -> Any:
    """What a stream adds up to."""
    options = {} if route == MESSAGES else {"stream_options": {"include_usage": True}}
    lines = post(server, route, {**fields, **options, "stream": True}).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    return _message(events) if route == MESSAGES else _choices(events)


def _choices(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that a chunk adds goes behind what was there."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            _add(choices.setdefault(choice["index"], {}), {**choice, "index": 0})
    usage = chunks[-1]["usage"]
    _forget_drafts(usage)
    return {"choices": choices, "usage": usage}


def _message(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"blocks": {}}
    for event in events:
        assert event["type"] != "error", event
        for part in ("content_block", "delta"):
            place = message["blocks"].setdefault(event["index"], {}) if "index" in event else message
            _add(place, event.get(part, {}))
    return {**message, "usage": events[-2]["usage"]}


def _add(told: dict[str, Any], more: dict[str, Any]) -> None:
    """To what was received so far. Texts and lists grow, calls by their index; of a type all are received."""
    for name, value in more.items():
        if name == "tool_calls":
            calls = told.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(call["index"], {}), {**call, "index": 0})
        elif isinstance(value, dict):
            _add(told.setdefault(name, {}), value)
        elif isinstance(value, (str, list)) and name != "type":
            told[name] = told.get(name, type(value)()) + value
        elif value is not None:
            told[name] = value


@EVERY_REQUEST
def test_speculation_changes_no_byte(without: Running, route: str, fields: dict[str, Any]) -> None:
    expected, drafted = whole(without, route, fields)
    assert drafted == 0
    assert ("tool_choice" in fields) == bool(re.search('"tool_calls"|"tool_use"', json.dumps(expected)))
    without.room.configure(speculation=True)
    for k in (3, "auto"):
        answer, drafted = whole(without, route, {**fields, "num_draft_tokens": k})
        assert k == "auto" or drafted > 0
        assert json.dumps(answer) == json.dumps(expected), k


@pytest.mark.slow
@EVERY_REQUEST
def test_speculation_changes_nothing_that_a_stream_adds_up_to(
    without: Running, route: str, fields: dict[str, Any]
) -> None:
    expected = streamed(without, route, fields)
    without.room.configure(speculation=True)
    assert streamed(without, route, {**fields, "num_draft_tokens": 5}) == expected
