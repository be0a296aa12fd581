"""One answer of a server: when its tokens came, however they were sent, and what is said of one that is none."""

import asyncio
from typing import Any

import pytest

from headstart.bench.load.answer import Answer, Arrival, apportion
from headstart.bench.load.ask import Heard, ask
from headstart.bench.load.target import Target
from headstart.bench.prompts import Prompt
from headstart.errors import HeadstartError, RequestError
from stub_server import Answer as Scheduled
from stub_server import Schedule, Stub, run

HELLO = Prompt("own", text="Hello")
PIECES = [(0.5, 1), (0.1, 1), (0.3, 3), (0.2, 2)]


def answered(schedule: Scheduled, *, patience: float = 30, chat: bool = True, **more: Any) -> Answer:
    async def once() -> Answer:
        async with Stub(lambda body, busy: schedule) as url:
            target = Target.of(url, model="stub", chat=chat)
            async with target.client(patience) as http:
                return await ask(http, target, HELLO, 16, **more)

    return run(once())


def failure(schedule: Scheduled, **more: Any) -> str:
    answer = answered(schedule, **more)
    assert answer.tokens == 0
    assert answer.error is not None
    return answer.error


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("running_usage", [True, False])
def test_tokens_that_come_together_share_the_time_since_those_before(chat: bool, running_usage: bool) -> None:
    answer = answered(Schedule(PIECES, chat=chat, running_usage=running_usage), chat=chat)
    assert answer.error is None
    assert answer.counted == "usage"
    assert [arrival.tokens for arrival in answer.arrivals] == [1, 1, 3, 2]
    assert answer.first == pytest.approx(0.5)
    assert list(answer.gaps()) == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert answer.seconds == pytest.approx(1.1)
    assert answer.rate == pytest.approx(7 / 1.1)


def test_a_tokenizer_counts_where_the_server_does_not() -> None:
    answer = answered(Schedule(PIECES, usage=None), count=lambda text: len(text) // 4)
    assert answer.counted == "tokenizer"
    assert [arrival.tokens for arrival in answer.arrivals] == [1, 1, 3, 2]


def test_without_any_count_a_chunk_is_a_token_and_said_to_be() -> None:
    answer = answered(Schedule(PIECES, usage=None))
    assert answer.counted == "chunks"
    assert answer.tokens == 4


def test_done_is_an_end_where_no_reason_is_given() -> None:
    answer = answered(Schedule(PIECES, finish_reason=None))
    assert answer.error is None
    assert answer.seconds == pytest.approx(1.1)


def test_time_runs_from_when_it_was_due() -> None:
    async def late() -> Answer:
        async with Stub(lambda body, busy: Schedule(PIECES)) as url:
            target = Target.of(url, model="stub")
            async with target.client(30) as http:
                due = asyncio.get_running_loop().time()
                await asyncio.sleep(2)
                return await ask(http, target, HELLO, 16, asked=due)

    answer = run(late())
    assert answer.first == pytest.approx(2.5)
    assert answer.seconds == pytest.approx(3.1)


def test_origins_count_tokens_and_chunks_of_one_moment_are_one_arrival() -> None:
    heard = Heard()
    for when, text, origins in (
        (1.0, "a", ["plain"]),
        (2.0, "b", ["draft"]),
        (2.0001, "", ["draft"]),  # half a character
        (2.0002, "ü", ["bonus"]),
        (3.0, "c", ["plain"]),
    ):
        heard.take({"choices": [{"delta": {"content": text}, "origins": origins, "finish_reason": None}]}, when)
    heard.take({"choices": [{"delta": {}, "finish_reason": "stop"}]}, 3.5)
    answer = heard.answer(0.0, None)
    assert answer.arrivals == (Arrival(1.0, 1), Arrival(2.0, 3), Arrival(3.0, 1))
    assert answer.ended == 3.5


def test_thoughts_and_calls_of_tools_are_tokens_too() -> None:
    heard = Heard()
    call = {"index": 0, "function": {"name": "look", "arguments": '{"at'}}
    for when, delta in ((1.0, {"reasoning_content": "Hm"}), (2.0, {"tool_calls": [call]}), (3.0, {"content": None})):
        heard.take({"choices": [{"delta": delta, "finish_reason": "stop" if when == 3.0 else None}]}, when)
    assert [arrival.when for arrival in heard.answer(0.0, None).arrivals] == [1.0, 2.0]


def test_drafts_are_read_from_the_usage_where_there_are_no_stats() -> None:
    details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
    answer = answered(Schedule(PIECES, usage={"completion_tokens_details": details}))
    assert answer.drafts is not None
    assert (answer.drafts.proposed, answer.drafts.accepted, answer.drafts.rounds) == (8, 6, None)
    assert answered(Schedule(PIECES)).drafts is None


@pytest.mark.parametrize(
    ("total", "sizes", "tokens"),
    [
        (3, [9, 1, 4], [1, 1, 1]),  # a chunk for each token, whatever its length
        (6, [4, 12, 8], [1, 3, 2]),
        (8, [5, 5, 5], [3, 3, 2]),
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
        (Schedule(PIECES, end="stall"), "stalled: nothing arrived for too long (--timeout)"),
        (Schedule(PIECES, end="error"), "answered 200: it failed here"),
        (Schedule(PIECES, end="break"), "the connection broke"),
        (Schedule([]), "an answer without a word"),
        ((500, {"error": {"message": "it is broken"}}), "answered 500: it is broken"),
        ((404, {"error": "mlx-lm's shape"}), "answered 404: mlx-lm's shape"),
        ((502, "<html>Bad gateway</html>"), "answered 502: <html>Bad gateway</html>"),
        ((200, {"choices": [{"message": {"content": "whole"}}]}), "not a stream, but application/json"),
    ],
)
def test_an_answer_that_is_none_says_why(schedule: Scheduled, message: str) -> None:
    assert failure(schedule).startswith(message)


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ('{"choices": ["no object"]}', "a chunk that is not in OpenAI's shape"),
        ('{"choices": [{"delta": "text"}]}', "a chunk that is not in OpenAI's shape"),
        ('{"choices": [{"text": "a"}], "usage": 3}', "a chunk that is not in OpenAI's shape"),
        ("[1]", "a chunk that is not a JSON object: '[1]'"),
        ('{"cut', "a chunk that is not a JSON object"),
    ],
)
def test_a_chunk_in_no_known_shape_is_an_error_and_not_a_crash(odd: str, message: str) -> None:
    assert failure(Schedule(PIECES, odd=odd)).startswith(message)


async def _found(stub: Stub, path: str = "", **more: Any) -> Target:
    async with stub as url:
        target = Target.of(f"{url}{path}", **more)
        async with target.client(5) as http:
            return await target.found(http)


def test_the_only_model_needs_no_name() -> None:
    assert run(_found(Stub(lambda body, busy: Schedule(PIECES), models=["one"]))).model == "one"


def test_one_of_several_models_must_be_named() -> None:
    stub = Stub(lambda body, busy: Schedule(PIECES), models=["one", "two"])
    with pytest.raises(HeadstartError, match=r"which model\? Give --model; it names one, two"):
        run(_found(stub))


def test_a_key_is_sent_and_its_lack_is_said() -> None:
    assert run(_found(Stub(lambda body, busy: Schedule(PIECES), key="secret"), key="secret")).model == "stub"
    with pytest.raises(HeadstartError, match="answered 401: no valid key: give its --api-key"):
        run(_found(Stub(lambda body, busy: Schedule(PIECES), key="secret"), key="wrong"))
    assert "secret" not in repr(Target.of("http://a", key="secret"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:8000", "127.0.0.1:8000: not an address: it must be like http://"),
        ("ftp://a", "not an address"),
        ("http://a#stream=false", "stream is not set behind #"),
        ("http://a#0", "behind # stands name=value"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Target.of(address)


def test_an_address_may_have_the_path_or_not() -> None:
    assert Target.of("http://a:1").url == Target.of("http://a:1/").url == Target.of("http://a:1/v1/").url
    assert Target.of("https://a/api/v3").url == "https://a/api/v3"
    assert Target.of("http://a#num_draft_tokens=auto&top_p=0.5").body == {"num_draft_tokens": "auto", "top_p": 0.5}
