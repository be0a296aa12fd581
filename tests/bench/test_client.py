"""One response of a server: when its tokens arrived, however they were sent, and how a failure is described."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from bench.client import BenchServer, TimedResponse, apportion, send_request
from headstart.bench.prompts import BenchPrompt
from headstart.errors import HeadstartError, RequestError
from stub_server import Answer as Scheduled
from stub_server import Schedule, Stub, run

HELLO = BenchPrompt(text="Hello")
PIECES = [(0.5, 1), (0.1, 1), (0.3, 3), (0.2, 2)]


def answered(schedule: Scheduled, *, chat: bool = True) -> TimedResponse:
    async def once() -> TimedResponse:
        async with Stub(lambda body, busy: schedule) as url:
            server = BenchServer.parse(url, model="stub", chat=chat)
            async with server.client(30) as http:
                return await send_request(http, server, HELLO, 16)

    return run(once())


def failure(schedule: Scheduled) -> str:
    response = answered(schedule)
    assert response.tokens == 0
    assert response.error is not None
    return response.error


@pytest.mark.parametrize("chat", [True, False])
def test_tokens_that_come_together_share_the_time_since_those_before(chat: bool) -> None:
    response = answered(Schedule(PIECES, chat=chat), chat=chat)
    assert response.error is None
    assert response.counted == "usage"
    assert [tokens for _, tokens in response.arrivals] == [1, 1, 3, 2]
    assert response.ttft == pytest.approx(0.5)
    assert response.gaps == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert response.e2e == pytest.approx(1.1)


def test_without_a_count_chunks_are_counted_and_reported_as_such() -> None:
    response = answered(Schedule(PIECES, usage=None))
    assert response.counted == "chunks"
    assert response.tokens == 4


def test_done_is_an_end_where_no_reason_is_given() -> None:
    response = answered(Schedule(PIECES, finish_reason=None))
    assert response.error is None
    assert response.e2e == pytest.approx(1.1)


def test_time_runs_from_when_it_was_due() -> None:
    async def late() -> TimedResponse:
        async with Stub(lambda body, busy: Schedule(PIECES)) as url:
            server = BenchServer.parse(url, model="stub")
            async with server.client(30) as http:
                due = asyncio.get_running_loop().time()
                await asyncio.sleep(2)
                return await send_request(http, server, HELLO, 16, due=due)

    response = run(late())
    assert response.ttft == pytest.approx(2.5)
    assert response.e2e == pytest.approx(3.1)


def test_chunks_of_one_moment_are_one_arrival() -> None:
    response = TimedResponse(0.0)
    for when, text in ((1.0, "a"), (2.0, "b"), (2.0001, "c"), (3.0, "d")):
        response.add({"choices": [{"delta": {"content": text}}]}, when)
    response.add({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}, 3.5)
    response.count_tokens()
    assert response.arrivals == [(1.0, 1), (2.0, 2), (3.0, 1)]
    assert response.ended == 3.5


def test_thoughts_and_calls_of_tools_are_tokens_too() -> None:
    response = TimedResponse(0.0)
    call = {"index": 0, "function": {"name": "look", "arguments": '{"at'}}
    for when, delta in ((1.0, {"reasoning_content": "Hm"}), (2.0, {"tool_calls": [call]}), (3.0, {"content": None})):
        response.add({"choices": [{"delta": delta, "finish_reason": "stop" if when == 3.0 else None}]}, when)
    response.count_tokens()
    assert [when for when, _ in response.arrivals] == [1.0, 2.0]


def test_drafts_are_read_from_the_usage_where_there_are_no_stats() -> None:
    details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
    response = answered(Schedule(PIECES, usage={"completion_tokens_details": details}))
    assert response.drafts == (8, 6, 0)
    assert answered(Schedule(PIECES)).drafts == (0, 0, 0)


@pytest.mark.parametrize(
    ("total", "sizes", "tokens"),
    [
        (3, [9, 1, 4], [1, 1, 1]),  # a chunk for each token, whatever its length
        (6, [4, 12, 8], [1, 3, 2]),
        (8, [5, 5, 5], [3, 2, 3]),
        (5, [1, 100], [1, 4]),
        (2, [1, 1, 1, 1], [0, 1, 0, 1]),  # tokens in two chunks each
        (7, [3], [7]),
    ],
)
def test_tokens_are_given_to_pieces_by_their_text(total: int, sizes: list[int], tokens: list[int]) -> None:
    assert apportion(total, sizes) == tokens
    assert sum(tokens) == total


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(PIECES, end="stall"), "no data received within --timeout"),
        (Schedule(PIECES, end="error"), "answered 200: it failed here"),
        (Schedule(PIECES, end="break"), "connection lost"),
        (Schedule([]), "the response has no text"),
        ((500, {"error": {"message": "it is broken"}}), "answered 500: it is broken"),
        ((404, {"error": "mlx-lm's shape"}), "answered 404: mlx-lm's shape"),
        ((502, "<html>Bad gateway</html>"), "answered 502: <html>Bad gateway</html>"),
        ((200, {"choices": [{"message": {"content": "whole"}}]}), "not a stream, but application/json"),
    ],
)
def test_an_invalid_answer_is_reported_with_the_reason(schedule: Scheduled, message: str) -> None:
    assert failure(schedule).startswith(message)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ('{"choices": ["no object"]}', "a chunk is not in OpenAI's format"),
        ('{"choices": [{"delta": "text"}]}', "a chunk is not in OpenAI's format"),
        ('{"choices": [{"text": "a"}], "usage": 3}', "a chunk is not in OpenAI's format"),
        ("[1]", "a chunk is not a JSON object: '[1]'"),
        ('{"cut', "a chunk is not a JSON object"),
    ],
)
def test_a_chunk_in_no_known_shape_is_an_error_and_not_a_crash(odd: str, message: str) -> None:
    assert failure(Schedule(PIECES, odd=odd)).startswith(message)


async def _found(stub: Stub, path: str = "", **more: Any) -> BenchServer:
    async with stub as url:
        server = replace(BenchServer.parse(f"{url}{path}"), **more)
        async with server.client(5) as http:
            return await server.with_model(http)


def test_the_only_model_needs_no_name() -> None:
    assert run(_found(Stub(lambda body, busy: Schedule(PIECES), models=["one"]))).model == "one"


def test_one_of_several_models_must_be_named() -> None:
    stub = Stub(lambda body, busy: Schedule(PIECES), models=["one", "two"])
    with pytest.raises(HeadstartError, match="give the name of the MODEL to measure; it serves one, two"):
        run(_found(stub))


def test_a_key_is_sent_and_a_wrong_one_is_reported() -> None:
    assert run(_found(Stub(lambda body, busy: Schedule(PIECES), key="secret"), key="secret")).model == "stub"
    with pytest.raises(HeadstartError, match="answered 401: no valid key: give its --api-key"):
        run(_found(Stub(lambda body, busy: Schedule(PIECES), key="secret"), key="wrong"))
    assert "secret" not in repr(replace(BenchServer.parse("http://a"), key="secret"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:8000", "--url 127.0.0.1:8000: not a URL; give one such as http://"),
        ("ftp://a", "not a URL"),
        ("http://a#stream=false", "stream cannot be set after #, the benchmark sets it"),
        ("http://a#0", "write fields after # as name=value"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BenchServer.parse(address)


def test_an_address_may_have_the_path_or_not() -> None:
    assert (
        BenchServer.parse("http://a:1").url
        == BenchServer.parse("http://a:1/").url
        == BenchServer.parse("http://a:1/v1/").url
    )
    assert BenchServer.parse("https://a/api/v3").url == "https://a/api/v3"
    assert BenchServer.parse("http://a#num_draft_tokens=auto&top_p=0.5").body == {
        "num_draft_tokens": "auto",
        "top_p": 0.5,
    }


def test_a_url_may_name_the_server_and_its_model() -> None:
    server = BenchServer.parse("my server=http://a:1#model=7&k=2", model="other")
    assert (server.name, server.url, server.model, server.body) == ("my server", "http://a:1/v1", "7", {"k": 2})
    assert BenchServer.parse("http://a:1#k=2", model="other").name == "a:1#k=2"
    assert BenchServer.parse("http://a:1", model="other").model == "other"
