"""No slice of the event loop handles more than a bounded part of a body, whatever it holds: counted, not timed."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hostile import connect
from running import Running
from scripted import ScriptedRoom, scripted
from slices import watched

from headstart.server.middleware import MAX_VALUES, ValueCounter
from headstart.server.openai_request import MAX_ANSWERS
from headstart.server.request_fields import MAX_ITEMS
from vision_models import encoded

Body = dict[str, Any]
CALLS = 4_000  # of functions: the largest request here needs more than 100,000
CHARACTERS = 2**20  # gone through by functions in C, some of which see the same again; a body has up to 15 million

PARTS: list[Body] = [{"type": "text", "text": ""}] * MAX_ITEMS
INPUT_PARTS: list[Body] = [{"type": "input_text", "text": ""}] * MAX_ITEMS
EMPTY = {"role": "user", "content": ""}
LONG = "word " * 3_000_000
WIDE = {"x": [[]] * 60_000}  # a field that is not known
TOOL = {"name": "f", "parameters": {"type": "object"}, "description": "d" * 10**7}
CHATS: dict[str, Body] = {
    "parts": {"messages": [{"role": "user", "content": PARTS}] * 2},
    "messages": {"messages": [EMPTY] * MAX_ITEMS},
    "a long text": {"messages": [{"role": "user", "content": LONG}]},
    "a long text of a tool": {"messages": [EMPTY], "tools": [{"type": "function", "function": TOOL}]},
    "an unknown field": {"messages": [EMPTY], **WIDE},
    "stops": {"messages": [EMPTY], "stop": ["x"] * MAX_ITEMS},
    "an invalid element at the end": {"messages": [*[EMPTY] * (MAX_ITEMS - 1), {"role": "x"}]},
}
BODIES: dict[str, dict[str, Body]] = {
    "chat/completions": CHATS,
    "completions": {
        "a long text": {"prompt": LONG},
        "token ids": {"prompt": [5] * 130_000},
        "lists": {"prompt": ["x"] * MAX_ITEMS},
        "a grammar": {"prompt": "x", "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x"] * 100_000}}
        }},
    },
    "messages": {
        **{name: {**body, "max_tokens": 5} for name, body in CHATS.items() if "tool" not in name and name != "stops"},
        "results": {"max_tokens": 5, "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": PARTS}
        ]}]},
    },
    "messages/count_tokens": {name: CHATS[name] for name in ("parts", "messages", "a long text")},
    "responses": {
        "parts": {"input": [{"role": "user", "content": INPUT_PARTS}] * 2},
        "messages": {"input": [EMPTY] * MAX_ITEMS},
        "truncated": {"input": [EMPTY] * MAX_ITEMS, "truncation": "auto"},
        "an assistant's messages": {"input": [{"role": "assistant", "content": ""}] * MAX_ITEMS},
        "a long text": {"input": LONG},
        "metadata": {"input": "x", "metadata": {"x": LONG}},
        "tools": {"input": "x", "tools": [{"type": "function", **TOOL}], "tool_choice": "none"},
        "an unknown field": {"input": "x", **WIDE},
    },
    "responses/compact": {
        "messages": {"model": "tiny", "input": [EMPTY] * MAX_ITEMS},
        "a long text": {"model": "tiny", "input": LONG},
    },
    "tokenize": {
        "a long text": {"content": LONG},
        "pieces": {"content": "word " * 1200, "with_pieces": True},
    },
    "detokenize": {"token ids": {"tokens": [5] * 130_000}},
}  # fmt: skip
# Every body as a stream or not, in turn; the other way in the slow tests.
CASES = [
    pytest.param(path, name, stream, marks=[pytest.mark.slow] * (stream != bool(number % 2)))
    for path, bodies in BODIES.items()
    for number, name in enumerate(bodies)
    for stream in (False, True)
]


@pytest.fixture(scope="module")
def here() -> Iterator[tuple[Running, ScriptedRoom]]:
    with scripted(burst=3) as server:
        for stream in (False, True):  # what is imported on first use is no part of a body
            ask(server, "completions", {"prompt": "x", "stream": stream})
        yield server


def ask(here: tuple[Running, ScriptedRoom], path: str, body: Body) -> httpx.Response:
    here[1].scripts.extend(["Yes."] * MAX_ANSWERS)
    with here[0].http() as http:
        return http.post(f"/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("path", "name", "stream"), CASES, ids=lambda value: str(value))
def test_no_slice_handles_a_whole_body(
    here: tuple[Running, ScriptedRoom], path: str, name: str, stream: bool
) -> None:
    body = BODIES[path][name] | ({"stream": True} if stream and "count" not in path else {})
    with watched() as slices:
        answer = ask(here, path, body)
        if path == "responses" and answer.is_success and not stream:  # it is stored
            id = answer.json()["id"]
            with here[0].http() as http:
                assert http.get(f"/v1/responses/{id}").json()["id"] == id
            again = ask(here, path, {"input": "And?", "previous_response_id": id, "truncation": "auto"})
            assert again.json()["output"][0]["content"][0]["text"] == "Yes."
    assert answer.status_code in (200, 400), answer.text[:500]
    assert slices.seen > 10
    assert slices.calls[0] < CALLS, slices
    assert slices.characters[0] < CHARACTERS, slices


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
@pytest.mark.parametrize("good", [True, False], ids=["a picture", "no picture"])
def test_no_slice_handles_a_whole_picture(seeing: Running, path: str, good: bool) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (1400, 1400, 3), np.uint8)
    data = b64encode(encoded(noise) if good else bytes(10_000_000)).decode()
    url = f"data:image/png;base64,{data}"
    part: Body = {
        "chat/completions": {"type": "image_url", "image_url": {"url": url}},
        "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        "responses": {"type": "input_image", "image_url": url},
    }[path]
    content = [{**part}]
    body: Body = {"input" if path == "responses" else "messages": [{"role": "user", "content": content}]}
    body["max_output_tokens" if path == "responses" else "max_tokens"] = 1
    with seeing.http() as http, watched() as slices:
        answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == (200 if good else 400), answer.text[:500]
    assert slices.calls[0] < CALLS, slices
    assert slices.characters[0] < CHARACTERS, slices


def test_no_slice_handles_many_chunks(here: tuple[Running, ScriptedRoom]) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "%b"}' % (b"x" * 40_000))
    with watched() as slices, connect(here[0].url) as client:
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 400")
    assert slices.calls[0] < 200_000, slices


VALUES = [
    b'{"a": [1, {"b": "x, [ { \\" , \\\\"}, []], "c": ""}',
    b'["\\\\\\"[,{", "\\\\", [",", 1]]',
    json.dumps({"é\\": ['"', '\\\\"[', {"x": [1, 2, "\n"]}]}).encode(),
]


@pytest.mark.parametrize("body", VALUES)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_values_are_counted_as_they_arrive(body: bytes, size: int) -> None:
    counter = ValueCounter(MAX_VALUES)
    for start in range(0, len(body), size):
        counter.add(body[start : start + size])
    assert counter._count == _separators(json.loads(body))


def _separators(value: Any) -> int:
    if not isinstance(value, (list, dict)):
        return 0
    each = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(each) - 1) + sum(map(_separators, each))
