"""Figures of a server under load, held against one whose every delay is known."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from bench.client import BenchServer
from bench.load import LENGTHS, LoadTest, PromptSource, drive
from bench.load_report import LoadMeasurement, LoadReport, Percentiles, summarise_load
from headstart.bench.plan import BenchPlan, Condition, LoadKind, run_plan
from headstart.bench.prompts import BenchPrompt
from headstart.bench.system import system_info
from headstart.errors import RequestError
from stub_server import Answer, Schedule, Stub, Timeless, run

WITHIN = 0.02  # of the truth
DRAFTING = Schedule(  # several tokens at once: 40, 40, 40, 40, 30, 30 and 20 ms between them
    [(0.5, 1), (0.04, 1), (0.12, 3), (0.06, 2), (0.02, 1)],
    after=0.01,
    stats={"proposed_draft_tokens": 6, "accepted_draft_tokens": 3, "rounds": 5},
)


def near_to(value: float | tuple[float, ...]) -> Any:
    return pytest.approx(value, rel=WITHIN)


def measured(
    *answers: Callable[[dict[str, Any], int], Answer] | Schedule,
    stubs: list[Stub] | None = None,
    urls: Callable[[list[str]], Sequence[str]] = lambda urls: [f"server {i}={url}" for i, url in enumerate(urls)],
    load: LoadKind = "concurrency",
    value: float = 1,
    repeats: int = 2,
    prompts: PromptSource | None = None,
    **settings: Any,
) -> LoadReport:
    """Measure a stub server for each of the answers, on a clock that moves only while everybody waits."""
    stubs = stubs or [Stub(a if callable(a) else lambda body, busy, a=a: a) for a in answers]
    with asyncio.Runner(loop_factory=Timeless) as runner:
        started = [runner.run(stub.__aenter__()) for stub in stubs]
        servers = [BenchServer.parse(url) for url in urls(started)]
        prompts = prompts or PromptSource.parse("short")
        plan = BenchPlan([server.name for server in servers], prompts.names, load, [value], repeats=repeats)
        with LoadTest(runner, servers, prompts, **{"requests": 4} | settings) as test:
            trials, stopped = run_plan(plan, test.measure, lambda doing: None)
    return LoadReport(test.models, system_info(), plan, summarise_load(plan, trials), stopped)


def only(report: LoadReport) -> LoadMeasurement:
    (measurement,) = report.measurements
    return measurement


def sent(stub: Stub) -> list[str]:
    return [body["messages"][0]["content"] for _, _, body in stub.asked]


@pytest.mark.parametrize("clients", [1, 3])
def test_every_figure_of_clients_that_wait_is_true(clients: int) -> None:
    found = only(measured(DRAFTING, value=clients, requests=6))
    assert (found.requests, found.errors, found.counted) == (12, {}, {"usage": 12})
    assert found.completion_tokens == 8
    assert (found.ttft.p50, found.ttft.p99) == near_to((0.5, 0.5))
    assert found.itl is not None
    assert (found.itl.p50, found.itl.p99) == near_to((0.04, 0.04))
    assert (found.e2e.p50, found.e2e.p99) == near_to((0.75, 0.75))
    assert found.requests_per_second == near_to(clients / 0.75)
    assert (found.tokens_per_second.low, found.tokens_per_second.high) == near_to((clients * 8 / 0.75,) * 2)
    assert (found.acceptance_rate, found.tokens_per_round) == (0.5, 8 / 5)


def test_percentiles_are_interpolated() -> None:
    found = Percentiles.of([float(value) for value in range(101)])
    assert (found.p50, found.p95, found.p99) == (50, 95, 99)
    assert Percentiles.of([3.0]).p99 == 3.0


def test_percentiles_are_those_of_all_responses() -> None:
    number = iter(range(10**6))

    def answer(body: dict[str, Any], busy: int) -> Schedule:
        slow = next(number) % 10 + 1  # every run has each of the ten once
        return Schedule([(slow / 10, 1), *[(slow / 100, 1)] * 10])

    found = only(measured(answer, requests=10))
    assert found.itl is not None
    # Of 0.1 to 1.0 twice each, interpolated.
    for part, scale in ((found.ttft, 1), (found.itl, 0.1)):
        assert part.p50 == near_to(0.55 * scale)
        assert part.p99 == near_to(1.0 * scale)
    assert found.ttft.p95 == near_to(1.0)  # place 18.05 of 0 to 19
    assert found.e2e.p50 == near_to(1.1)


def test_poisson_arrivals_do_not_wait_for_answers() -> None:
    stub = Stub(lambda body, busy: Schedule([(0.5, 1), (1.0, 1), (1.0, 2)]))
    found = only(measured(stubs=[stub], load="rate", value=4.0, requests=60, repeats=1))
    asked = [when for when, _, _ in stub.asked[-60:]]
    seconds = asked[-1] + 2.5 - asked[0]
    assert found.ttft.p99 == near_to(0.5)
    assert found.e2e.p99 == near_to(2.5)
    assert found.tokens_per_second.median == near_to(60 * 4 / seconds)
    assert found.requests_per_second == near_to(60 / seconds)
    assert stub.most > 5


def test_arrivals_are_poisson_and_the_same_for_everyone() -> None:
    async def due(number: int, when: float) -> float:
        return when

    times = run(drive(Condition("short", "rate", 4.0), due, 400, Random(1)))
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert fmean(gap**2 for gap in gaps) == pytest.approx(2 / 4**2, rel=0.2)  # an exponential's
    again = run(drive(Condition("short", "rate", 4.0), due, 400, Random(1)))
    assert [b - a for a, b in pairwise(again)] == gaps


def test_clients_that_wait_are_never_more_than_they_are() -> None:
    stub = Stub(lambda body, busy: Schedule([(0.1 * busy, 1), (0.1, 8)]))
    measured(stubs=[stub], value=3, requests=7)
    assert stub.most == 3


def test_servers_are_compared_within_a_repeat() -> None:
    """Both get slower and slower, as a machine does."""
    requests = iter(range(1, 10**6))
    pace = [1.0]

    def first(body: dict[str, Any], busy: int) -> Schedule:
        return Schedule([(0.4 * pace[0], 1), (0.1 * pace[0], 2), (0.1 * pace[0], 2)])

    def second(body: dict[str, Any], busy: int) -> Schedule:
        return Schedule([(0.2 * pace[0], 1), (0.1 * pace[0], 4)])

    class Slower(Stub):
        async def _answer(self, *request: Any) -> None:
            pace[0] = 1 + next(requests) // 10
            await super()._answer(*request)

    baseline, other = measured(stubs=[Slower(first), Slower(second)], repeats=6, requests=10).measurements
    assert baseline.relative == {}
    assert other.relative["ttft"].median == pytest.approx(0.5, rel=0.1)
    assert other.relative["tokens_per_second"].median == pytest.approx(2.0, rel=0.1)
    assert other.relative.keys() == {"tokens_per_second", "ttft", "itl", "e2e"}


def test_all_servers_get_the_same_prompts_and_none_the_same_twice() -> None:
    stubs = [Stub(lambda body, busy: DRAFTING) for _ in range(2)]
    measured(stubs=stubs)
    texts = [sent(stub) for stub in stubs]
    assert texts[0] == texts[1]
    assert len({text.split()[0] for text in texts[0]}) == len(texts[0]) == 1 + 3 * 4


def test_one_server_in_two_ways_does_not_get_the_same_prompt_twice() -> None:
    stub = Stub(lambda body, busy: DRAFTING)
    measured(
        stubs=[stub],
        urls=lambda urls: [f"{urls[0]}#num_draft_tokens=0&acceptance=ratio", f"{urls[0]}/v1/"],
        repeats=1,
        requests=2,
    )
    bodies = [body for _, _, body in stub.asked]
    assert [body.get("num_draft_tokens") for body in bodies].count(0) == 5
    assert {body.get("acceptance") for body in bodies} == {"ratio", None}
    assert len({text.split()[0] for text in sent(stub)}) == 10


def test_lengths_numbers_of_words_kinds_and_files_are_chosen_together(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("Once upon a time\n")
    source = PromptSource.parse(f"code,long,300,{own}")
    assert source.names == ["code", "own", "long", "300 words"]
    assert source.prompt("own", 5).text == "Once upon a time"
    assert source.prompt("code", 0) != source.prompt("code", 1)
    assert source.prompt("code", 0) == source.prompt("code", 8)
    assert len(source.prompt("300 words", 0).text.split()) == 300
    assert source.prompt("long", 0) == source.prompt("long", 0) != source.prompt("long", 0, "again")


@pytest.mark.parametrize("name", LENGTHS)
def test_prompts_have_their_number_of_words(name: str) -> None:
    stub = Stub(lambda body, busy: DRAFTING)
    measured(stubs=[stub], prompts=PromptSource.parse(name), requests=2, repeats=1)
    assert {len(text.split()) for text in sent(stub)} == {LENGTHS[name]}


def test_given_prompts_are_sent_as_they_are() -> None:
    stub = Stub(lambda body, busy: DRAFTING)
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    given = PromptSource({"own": [BenchPrompt(text="Go on from here"), BenchPrompt(messages=chat)]})
    measured(stubs=[stub], prompts=given, requests=2, repeats=1)
    assert [body["messages"] for _, _, body in stub.asked[-2:]] == [
        [{"role": "user", "content": "Go on from here"}],
        list(chat),
    ]


def test_failed_requests_are_counted_and_named_and_not_timed() -> None:
    number = iter(range(10**6))

    def answer(body: dict[str, Any], busy: int) -> Answer:
        return (503, {"error": {"message": "full"}}) if next(number) % 4 == 3 else DRAFTING

    report = measured(answer, requests=8)
    found = only(report)
    assert (found.requests, found.errors) == (16, {"answered 503: full": 4})
    assert found.e2e.p50 == near_to(0.75)
    assert found.tokens_per_second.median == near_to(8 / 0.75)
    assert "server 0, 4 of 16 requests failed: answered 503: full" in report.markdown()


def test_a_server_that_stops_answering_ends_it_and_what_was_measured_is_kept() -> None:
    number = iter(range(10**6))
    # One request to check the server, four to warm up, four that count.
    stub = Stub(lambda body, busy: DRAFTING if next(number) < 9 else Schedule([(0.1, 1)], end="stall"))
    report = measured(stubs=[stub], repeats=5, timeout=30)
    assert report.stopped == (
        "server 0: no request succeeded (short, 1 at a time): no data received within --timeout"
    )
    assert only(report).repeats == 1


def test_a_server_that_does_not_count_tokens_is_named() -> None:
    report = measured(Schedule([(1.0, 1), (0.1, 1)], usage=None), repeats=1)
    assert report.models == {"server 0": "stub"}
    assert "server 0 does not count its tokens: chunks were counted" in report.markdown()


def test_the_folder_of_a_model_is_not_reported() -> None:
    stub = Stub(lambda body, busy: DRAFTING, models=["/home/somebody/model"])
    assert measured(stubs=[stub], repeats=1).models == {"server 0": "model"}


def test_two_servers_of_one_name_are_refused() -> None:
    server = BenchServer.parse("http://a")
    with (
        asyncio.Runner() as runner,
        pytest.raises(RequestError, match="two servers are called a: give --url NAME=URL"),
    ):
        LoadTest(runner, [server, replace(server, model="b")], PromptSource.parse("short"))
