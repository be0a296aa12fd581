"""/v1/messages of the real engine through the real anthropic client: exact, counted, cached, pinged, cancelled."""

import json
import threading
from itertools import count
from types import ModuleType
from typing import Any

import pytest
from running import CONTEXT, Running, alone, chat_tokens, running, wait_until

import headstart.server.event_stream
from headstart.limits import MAX_HEAD_K
from headstart.server.settings import Limits
from headstart.state import PrefixCache

HI = [{"role": "user", "content": "hi"}]
LONG = {"min_tokens": 3000}
SWITCH = {
    "name": "switch",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "attic"]}},
        "required": ["on", "room"],
    },
}


def create(server: Running, **fields: Any) -> Any:
    return server.anthropic().messages.create(**{"model": "tiny", "max_tokens": 24, "messages": HI, **fields})


def idle(server: Running) -> bool:
    return server.room.running + server.room.prefilling + server.room.queued == 0


def cancelled(server: Running) -> float:
    return server.metric("headstart_requests_total", endpoint="/v1/messages", outcome="cancelled")


def test_a_message_is_what_the_engine_generates_alone(server: Running) -> None:
    answer, expected = create(server), alone(chat_tokens("hi"), max_tokens=24)
    assert [block.text for block in answer.content] == [expected.text]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 24)
    stats = answer.generation_stats
    assert (stats["drafter_kind"], stats["ignored_fields"]) == ("native_mtp+copy", [])


def test_the_streaming_helper_has_the_same_text(server: Running) -> None:
    with server.anthropic().messages.stream(model="tiny", max_tokens=24, messages=HI) as stream:  # type: ignore[arg-type]
        texts, message = list(stream.text_stream), stream.get_final_message()
    whole = create(server)
    assert "".join(texts) == message.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert len(texts) > 4, "an event a round"
    assert (message.stop_reason, message.usage) == (whole.stop_reason, whole.usage)


def test_a_stream_is_sent_as_named_events(server: Running) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 5, "stream": True}
    with server.http() as http:
        response = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = response.text.split("\n\n")
    assert last == ""
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


@pytest.mark.parametrize(
    "fields",
    [{"messages": HI},
     {"messages": HI, "system": [{"type": "text", "text": "Be brief."}], "tools": [SWITCH]},
     {"messages": [*HI, {"role": "assistant", "content": "Hello."}, *HI], "thinking": {"type": "adaptive"}}],
)  # fmt: skip
def test_counted_tokens_are_those_that_are_read(server: Running, fields: dict[str, Any]) -> None:
    counted = server.anthropic().messages.count_tokens(model="tiny", **fields)
    assert counted.input_tokens == create(server, **fields).usage.input_tokens
    assert server.anthropic().beta.messages.count_tokens(model="tiny", **fields).input_tokens == counted.input_tokens


def test_sampling_parameters_reach_the_engine(server: Running) -> None:
    params = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "top_n_sigma": 2.0, "seed": 7}
    expected = alone(chat_tokens("hi"), max_tokens=24, **params)
    assert create(server, extra_body=params).content[0].text == expected.text
    assert expected.text != alone(chat_tokens("hi"), max_tokens=24).text


def test_more_drafts_than_the_model_has_are_clamped_and_reported(server: Running) -> None:
    for asked, told in ((MAX_HEAD_K, None), (MAX_HEAD_K + 1, MAX_HEAD_K)):
        stats = create(server, extra_body={"num_draft_tokens": asked}).generation_stats
        assert stats["num_draft_tokens_clamped_to"] == told


def test_the_end_of_the_context_is_not_taken_for_the_requests_own() -> None:
    with running(context=64) as server:
        fields = {"max_tokens": 500, "extra_body": {"min_tokens": 500}}
        assert create(server, **fields).stop_reason == "model_context_window_exceeded"


def test_a_coding_agents_second_turn_is_found_in_the_cache() -> None:
    """As Claude Code asks: a line that is never the same in front, long instructions, many tools, the beta route."""
    instructions = "You help with software engineering. Read before you write, and test what you wrote. " * 20
    tools = [
        {
            "name": f"Tool{i}",
            "description": f"Does the thing number {i} with a file.",
            "input_schema": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "Where."}, "all": {"type": "boolean"}},
                "required": ["path"],
                "additionalProperties": False,
                "$schema": "http://json-schema.org/draft-07/schema#",
            },
        }
        for i in range(16)
    ]
    nonce = count(0x36EE5)

    def ask(server: Running, *messages: dict[str, Any], first: str = "You are an agent.") -> Any:
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={next(nonce):x};"
        mark = {"type": "ephemeral"}
        return server.anthropic().beta.messages.create(
            model="tiny",
            max_tokens=16,
            system=[
                {"type": "text", "text": line},
                {"type": "text", "text": first, "cache_control": mark},  # type: ignore[typeddict-item]
                {"type": "text", "text": instructions, "cache_control": mark},  # type: ignore[typeddict-item]
            ],
            tools=tools,  # type: ignore[arg-type]
            messages=list(messages),  # type: ignore[arg-type]
            thinking={"type": "adaptive"},
            metadata={"user_id": "somebody"},
            betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        )

    reminder = {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>\n"}
    turn = {"role": "user", "content": [reminder, {"type": "text", "text": "Mend the test."}]}
    with running(prefix=PrefixCache(10**8, chunk=512)) as server:
        first = ask(server, turn)
        length = first.usage.input_tokens
        assert (first.usage.cache_read_input_tokens, length > 1024) == (0, True)
        assert first.generation_stats["ignored_fields"] == []
        again = ask(server, turn)
        assert again.content == first.content
        history = [turn, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Go on."}]
        second = ask(server, *history)
        for usage in (again.usage, second.usage):
            assert length - 8 < usage.cache_read_input_tokens < length  # all but the header of the model's turn
        assert second.usage.input_tokens + second.usage.cache_read_input_tokens > length
        other = ask(server, turn, first="You are another agent.")
        assert other.usage.cache_read_input_tokens < 512


def test_pings_come_while_a_prompt_is_read(
    server: Running, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headstart.server.event_stream, "QUIET_SECONDS", 0.05)
    body = {"model": "tiny", "messages": HI, "max_tokens": 5, "stream": True}
    with server.http() as http, http.stream("POST", "/v1/messages", json=body) as response:
        names = (line.removeprefix("event: ") for line in response.iter_lines() if line.startswith("event: "))
        assert [next(names) for _ in range(4)] == ["message_start", "ping", "ping", "ping"]
        gate.set()
        rest = [name for name in names if name != "ping"]
    assert (rest[0], rest[-1]) == ("content_block_start", "message_stop")


def test_the_client_passes_over_pings(
    server: Running, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headstart.server.event_stream, "QUIET_SECONDS", 0.01)
    with server.anthropic().messages.stream(model="tiny", max_tokens=5, messages=HI) as stream:  # type: ignore[arg-type]
        assert next(stream).type == "message_start"
        threading.Timer(0.2, gate.set).start()
        assert stream.get_final_message().usage.output_tokens == 5


@pytest.mark.parametrize("read", [False, True])
def test_who_goes_away_is_cancelled(
    server: Running, gate: threading.Event, read: bool, anthropic: ModuleType
) -> None:
    """While the prompt is read, and while the answer is."""
    before = cancelled(server)
    fields = {"model": "tiny", "max_tokens": 3000, "messages": HI, "extra_body": LONG}
    with server.anthropic().messages.stream(**fields) as stream:
        wait_until(lambda: server.room.prefilling)
        if read:
            gate.set()
            next(stream.text_stream)
    gate.set()
    wait_until(lambda: idle(server) and cancelled(server) == before + 1)
    with pytest.raises(anthropic.APITimeoutError):
        server.anthropic(timeout=0.3).messages.create(**fields)
    wait_until(lambda: idle(server) and cancelled(server) == before + 2)


def test_a_message_can_be_cancelled_by_its_id(server: Running) -> None:
    with server.anthropic().messages.stream(
        model="tiny",
        max_tokens=3000,
        messages=HI,
        extra_body=LONG,  # type: ignore[arg-type]
    ) as stream:
        start = next(stream)
        assert start.type == "message_start"
        with server.http() as http:
            assert http.post(f"/v1/requests/{start.message.id}/cancel").status_code == 200
        assert stream.get_final_message().stop_reason == "cancelled"


def test_an_error_inside_a_stream_is_raised_by_the_client(anthropic: ModuleType) -> None:
    with running(limits=Limits(request_seconds=1.5)) as server:
        client = server.anthropic()
        create(server, max_tokens=2)
        fields = {"model": "tiny", "max_tokens": CONTEXT, "messages": HI, "extra_body": LONG}
        with client.messages.stream(**fields) as stream, pytest.raises(anthropic.APIStatusError) as error:
            stream.get_final_message()
        assert error.value.type == "timeout_error"
        assert "not finished within" in str(error.value.api_message)
        with pytest.raises(anthropic.RequestTimeoutError):
            client.messages.create(**fields)
        wait_until(lambda: idle(server))
