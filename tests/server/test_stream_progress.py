"""A stream says how far it is while a prompt is read."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from running import Running, running

import headstart.server.event_stream
from headstart.state import PrefixCache

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "word " * 1100}]},
    "/v1/completions": {"prompt": "text " * 1100},
    "/v1/responses": {"input": "news " * 1100},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(prefix=PrefixCache(10**8)) as server:
        yield server


def stream(server: Running, path: str, **fields: Any) -> Iterator[str]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = PATHS[path] | {"stream": True, limit: 5, **fields}
    with server.http() as http, http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        yield from response.iter_lines()


@pytest.mark.parametrize("path", PATHS)
def test_comments_come_while_a_prompt_is_read(
    server: Running, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(headstart.server.event_stream, "QUIET_SECONDS", 0.05)
    lines = stream(server, path)
    comments = (line for line in lines if line.startswith(":"))
    assert [next(comments).rpartition(" ")[0] for _ in range(3)] == [": prompt 0 of"] * 3
    gate.set()
    rest = [line for line in lines if line.startswith("data: ")]
    last = rest[-1] if path == "/v1/responses" else rest[-2]  # before [DONE]
    assert json.loads(last.removeprefix("data: ")), "the stream is cut short"


def test_the_comments_tell_how_much_is_read(
    server: Running, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """The second chunk waits until there was a comment on the first."""
    monkeypatch.setattr(headstart.server.event_stream, "QUIET_SECONDS", 0.05)
    told = []
    for line in stream(server, "/v1/completions", prompt="other " * 1100):
        if line.startswith(": prompt"):
            told.append(int(line.split()[2]))
            gate.set()
    assert told
    assert told == sorted(told)


def test_nothing_is_said_where_output_comes(server: Running) -> None:
    assert not [line for line in stream(server, "/v1/chat/completions") if line.startswith(":")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_prompt_progress_is_llama_cpps(server: Running, path: str) -> None:
    """`processed/total` of the prompt, of which `cache` was known; the last has all."""
    fields = {"prompt": "home " * 1100} if path == "/v1/completions" else {}
    fields = fields or {"messages": [{"role": "user", "content": "line " * 1100}]}
    runs = []
    for _ in range(2):
        data = [line.removeprefix("data: ") for line in stream(server, path, **fields, return_progress=True)]
        chunks = [json.loads(each) for each in data if each.startswith("{")]
        runs.append([chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk])
        progress = [chunk for chunk in chunks if "prompt_progress" in chunk]
        assert all(len(chunk["choices"]) == 1 and chunk["id"] == chunks[0]["id"] for chunk in progress)
        assert all(not (c["choices"][0].get("delta") or c["choices"][0].get("text")) for c in progress)
        assert "generation_stats" in chunks[-1]
        assert "return_progress" not in chunks[-1]["generation_stats"]["ignored_fields"]
    first, again = runs
    total = first[0]["total"]
    read = [each["processed"] for each in first]
    assert read == sorted(set(read))
    assert {512, 1024} < set(read)  # and between, on a slow machine
    assert read[-1] == total
    assert {each["cache"] for each in first} == {0}
    assert {each["cache"] for each in again} == {again[0]["processed"]}
    assert again[0]["processed"] >= 1024
    assert all(set(each) == {"total", "cache", "processed", "time_ms"} for each in first + again)
    times = [each["time_ms"] for each in first]
    assert times == sorted(times)


def test_without_asking_no_chunk_has_progress(server: Running) -> None:
    assert not [line for line in stream(server, "/v1/chat/completions") if "prompt_progress" in line]
