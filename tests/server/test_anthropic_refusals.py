"""Errors on Anthropic's routes, in the format that its client turns into typed exceptions."""

import json
from types import ModuleType
from typing import Any

import httpx
import pytest
from running import Running, running, wait_until

from headstart.server.settings import Limits

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "add", "input_schema": {"type": "object"}}


def ask(server: Running, fields: dict[str, Any], **options: Any) -> Any:
    """Whatever is in `fields` is sent, whether the client would permit it or not."""
    create = server.anthropic(**options).messages.create
    return create(model="tiny", max_tokens=4, messages=HI, extra_body=fields)  # type: ignore[arg-type]


def refused(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert (body.keys(), body["type"]) == ({"type", "error"}, "error")
    assert (body["error"].keys(), body["error"]["type"]) == ({"type", "message"}, kind)
    return str(body["error"]["message"])


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 2.5}, "top_k"),
    ({"top_n_sigma": -1}, "top_n_sigma"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"stop_sequences": ["a" * 257]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"seed": 2**70}, "seed"),
    ({"num_draft_tokens": -1}, "num_draft_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [*HI, {"role": "assistant", "content": "I"}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0]: Input tag 'wizard' found using 'role'"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (block(type="text"), "messages[0].content[0].text"),
    (block(type="text", text=5), "messages[0].content[0].text"),
    (block(type="audio"), "messages[0].content[0]"),
    (block(type="image", source={"type": "url", "url": "x"}), "messages[0].content[0]: image input is not"),
    (block(type="document", source={}), "messages[0].content[0].type: document input is not"),
    (block(type="tool_use", id="1", name="add", input={}), "messages[0].content[0]: Input tag 'tool_use'"),
    (block(type="tool_result", tool_use_id="1", content=[{"type": "image", "source": {"type": "url", "url": "x"}}]),
     "messages[0].content[0].content[0]: image input is not"),
    (block(type="tool_result", content="5"), "messages[0].content[0].tool_use_id"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image", "source": {}}]}, "system[0].type: image input is not supported"),
    ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: Input should be 'custom'"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "add"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "subtract"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{**TOOL, "input_schema": {"type": "object", "properties": {"a": {"type": "x"}}}}],
      "tool_choice": {"type": "any"}}, "tools[0]"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2**31}}, "thinking.budget_tokens: is 2147483648"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
    ({"output_config": {"effort": "heroic"}}, "output_config.effort"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "names"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_a_wrong_value_is_a_bad_request_that_names_the_field(
    server: Running, fields: dict[str, Any], names: str, anthropic: ModuleType
) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(server, fields)
    assert error.value.type == "invalid_request_error"
    assert str(error.value.api_message).startswith(names)


def test_other_models_and_paths_are_not_found(server: Running, anthropic: ModuleType) -> None:
    with pytest.raises(anthropic.NotFoundError) as error:
        ask(server, {"model": "claude"})
    assert error.value.type == "not_found_error"
    assert "'tiny'" in str(error.value.api_message)
    with pytest.raises(anthropic.NotFoundError):
        server.anthropic().messages.count_tokens(model="claude", messages=HI)  # type: ignore[arg-type]
    with server.http() as http:
        refused(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
        refused(http.get("/v1/messages"), 405, "invalid_request_error")
        assert http.get("/v1/messagesque").json()["error"]["code"] is None, "OpenAI's shape everywhere else"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": "\\ud800"}', b"[" * 100_000])
def test_a_body_that_cannot_be_read_is_a_bad_request(server: Running, body: bytes) -> None:
    with server.http() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            response = http.post(path, content=body, headers={"Content-Type": "application/json"})
            refused(response, 400, "invalid_request_error")


def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_claude_code_knows(
    server: Running, anthropic: ModuleType
) -> None:
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4095 maximum"):
        ask(server, {"messages": long})
    counted = server.anthropic().messages.count_tokens(model="tiny", messages=long)  # type: ignore[arg-type]
    assert counted.input_tokens > 5000


def test_keys_open_the_door_as_either_header(anthropic: ModuleType) -> None:
    with running(key="sesame") as server:
        for options in ({}, {"api_key": None, "auth_token": "sesame"}):
            assert ask(server, {}, **options).type == "message"
        for options in ({"api_key": "guess"}, {"api_key": None, "auth_token": "guess"}):
            with pytest.raises(anthropic.AuthenticationError) as error:
                ask(server, {}, **options)
            assert error.value.type == "authentication_error"


def test_a_body_that_is_too_large_is_refused(anthropic: ModuleType) -> None:
    with running(limits=Limits(body_bytes=2000)) as server:
        with pytest.raises(anthropic.RequestTooLargeError) as error:
            ask(server, {"messages": [{"role": "user", "content": "x" * 3000}]})
        assert error.value.type == "request_too_large"

        def pieces() -> Any:  # no Content-Length
            yield from (b"x" * 500 for _ in range(10))

        with server.http() as http:
            headers = {"Content-Type": "application/json"}
            response = http.post("/v1/messages", content=pieces(), headers=headers)
        refused(response, 413, "request_too_large")


def test_a_full_queue_is_a_rate_limit(anthropic: ModuleType) -> None:
    with running(max_sequences=1, max_queue=1) as server:
        long = {"max_tokens": 2000, "min_tokens": 2000, "stream": True}

        def stream() -> Any:
            messages = server.anthropic().messages
            return messages.create(model="tiny", max_tokens=9, messages=HI, stream=True, extra_body=long)  # type: ignore[arg-type]

        with stream():
            wait_until(lambda: server.room.running)
            with stream():
                wait_until(lambda: server.room.queued)
                with pytest.raises(anthropic.RateLimitError) as error:
                    ask(server, {})
        assert error.value.type == "rate_limit_error"
        assert int(error.value.response.headers["retry-after"]) >= 1


def test_a_server_whose_engine_is_down_reports_it(anthropic: ModuleType) -> None:
    with running() as server:
        server.room.close(0)
        with pytest.raises(anthropic.ServiceUnavailableError) as error:
            ask(server, {})
        assert error.value.type == "overloaded_error"
