"""Limits of the grammar library: refused at once where that can be known, otherwise an error of the request's own."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import Running

WIDE = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
NESTED = {"type": "object", "properties": {"a": WIDE}, "required": ["a"], "additionalProperties": False}
# More tokens than a grammar is tried for, and then `{` begins what is too wide.
LATE = f"start: /[0-9]{{70}}/ wide\nwide: %json {json.dumps(WIDE)}"
HI = {"messages": [{"role": "user", "content": "hi"}]}
SHAPE: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {**HI, "response_format": SHAPE}, "response_format"),
    ("completions", {"prompt": "hi", "response_format": SHAPE}, "response_format"),
    ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": NESTED}}},
     "text.format"),
    ("messages", {**HI, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": NESTED}}},
     "output_config.format"),
    ("completions", {"prompt": "hi", "grammar": f"start: %json {json.dumps(WIDE)}"}, "grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), BODIES, ids=[f"{path}, {field}" for path, _, field in BODIES])
def test_a_schema_with_too_many_optional_properties_is_refused_at_once(
    server: Running, path: str, body: dict[str, Any], field: str
) -> None:
    with server.http() as http:
        answer = http.post(f"/v1/{path}", json={"model": "tiny", "stream": True, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(field)
    assert "items; max is 2000" in error["message"]


@pytest.mark.parametrize("k", [0, 4])
def test_a_limit_that_is_met_while_decoding_is_an_error_of_that_request(server: Running, k: int) -> None:
    body = {"prompt": "hi", "max_tokens": 200, "num_draft_tokens": k, "model": "tiny"}
    plain = {**body, "max_tokens": 120}
    with server.http() as http, ThreadPoolExecutor(2) as pool:
        alone = http.post("/v1/completions", json=plain).json()["choices"][0]["text"]
        beside = pool.submit(http.post, "/v1/completions", json=plain)
        answer = http.post("/v1/completions", json={**body, "grammar": LATE})
        assert beside.result().json()["choices"][0]["text"] == alone
        stream = http.post("/v1/completions", json={**body, "grammar": LATE, "stream": True})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("grammar_limit", "invalid_request_error")
    assert "a limit of the grammar library was met" in error["message"]
    assert "items; max is 2000" in error["message"]
    *chunks, last, done = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    assert (json.loads(last), done) == (answer.json(), "[DONE]")
    assert len("".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)) >= 69
