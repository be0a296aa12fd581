"""Turning speculation off changes no byte of a greedy or seeded answer, whatever else was asked of it."""

from typing import Any

import pytest
from running import Running

MESSAGES = [{"role": "user", "content": "Tell me of cats."}]
LIGHT = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall"]}, "note": {"type": "string", "maxLength": 20}},
            "required": ["room", "note"],
        },
    },
}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
SEEDED = {"temperature": 1.0, "seed": 11, "top_p": 0.9}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "seeded": SEEDED,
    "several": {"n": 3, **SEEDED},
    "logprobs": {"logprobs": True, "top_logprobs": 3, **SEEDED},
    "call": {"tools": [LIGHT], "tool_choice": "required", "parallel_tool_calls": False},
    "seeded call": {"tools": [LIGHT], "tool_choice": "required", "parallel_tool_calls": False, **SEEDED},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, **SEEDED},
    "thinking": {"enable_thinking": True, "thinking_budget": 8, "logit_bias": {"8188": 100}, **SEEDED},
    "thinking and schema": {
        "enable_thinking": True, "thinking_budget": 8, "logit_bias": {"8188": 100},
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    },
}  # fmt: skip


def answer(server: Running, asked: dict[str, Any], **more: Any) -> dict[str, Any]:
    with server.http() as http:
        response = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 120} | asked | more)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    stats = body.pop("generation_stats")
    assert stats["exact"]
    body["drafted"] = stats["proposed_draft_tokens"] > 0
    for name in ("id", "created"):
        del body[name]
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        del body["usage"]["completion_tokens_details"][name]
    for choice in body["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            assert call.pop("id").startswith("call_")
    return body


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_speculation_changes_no_byte(server: Running, asked: dict[str, Any]) -> None:
    without = answer(server, asked, num_draft_tokens=0)
    assert not without.pop("drafted")
    for k in (2, 5):
        drafted = answer(server, asked, num_draft_tokens=k)
        assert drafted.pop("drafted")
        assert drafted == without
