"""Figures of a server under load, held against one whose every delay is known."""

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from headstart.bench.load.arrivals import Closed, Load, Open, drive
from headstart.bench.load.figures import Figure, figures, ratios
from headstart.bench.load.measure import Plan, Run, measure
from headstart.bench.load.plot import plot
from headstart.bench.load.questions import LENGTHS, Questions, is_hit, made_up
from headstart.bench.load.report import report, requests_csv
from headstart.bench.load.target import Target
from headstart.bench.prompts import Prompt
from headstart.errors import HeadstartError, RequestError
from stub_server import Answer, Schedule, Stub, run

WITHIN = 0.02  # of the truth
DRAFTING = Schedule(  # several tokens at once: 40, 40, 40, 40, 30, 30 and 20 ms between them
    [(0.5, 1), (0.04, 1), (0.12, 3), (0.06, 2), (0.02, 1)],
    after=0.01,
    usage={"prompt_tokens": 77, "prompt_tokens_details": {"cached_tokens": 7}},
    stats={"proposed_draft_tokens": 6, "accepted_draft_tokens": 3, "rounds": 5},
)


def near_to(value: float) -> Any:
    return pytest.approx(value, rel=WITHIN)


def measured(
    *answers: Callable[[dict[str, Any], int], Answer] | Schedule,
    loads: tuple[Load, ...] = (Closed(1),),
    stubs: list[Stub] | None = None,
    **plan: Any,
) -> tuple[Plan, list[Run]]:
    """Runs of a server for each of the answers."""
    servers = stubs or [Stub(a if callable(a) else lambda body, busy, a=a: a) for a in answers]

    async def collect() -> tuple[Plan, list[Run]]:
        urls = [await server.__aenter__() for server in servers]
        targets = [Target.of(url, name=f"server {i}") for i, url in enumerate(urls)]
        wanted = Plan(
            targets, **{"questions": made_up(["short"]), "repeats": 2, "requests": 4, "loads": loads} | plan
        )
        return wanted, [run async for run in measure(wanted) if run is not None]

    return run(collect())


def figure(plan: Plan, runs: list[Run]) -> Figure:
    (only,) = figures(runs, [target.name for target in plan.targets])
    return only


@pytest.mark.parametrize("clients", [1, 3])
def test_every_figure_of_clients_that_wait_is_true(clients: int) -> None:
    found = figure(*measured(DRAFTING, loads=(Closed(clients),), requests=6))
    assert found.requests == 12
    assert found.errors == {}
    assert found.tokens == 8
    assert found.counted == {"usage": 12}
    assert (found.prompt_tokens, found.cached_tokens) == (77, 7)
    assert found.first_token.p50 == near_to(0.5)
    assert found.first_token.p99 == near_to(0.5)
    assert found.between_tokens is not None
    assert found.between_tokens.p50 == near_to(0.04)
    assert found.between_tokens.p99 == near_to(0.04)
    assert found.end_to_end.p50 == near_to(0.75)
    assert found.end_to_end.p99 == near_to(0.75)
    assert found.tokens_per_second.p50 == near_to(8 / 0.75)
    assert found.throughput.median == near_to(clients * 8 / 0.75)
    assert found.throughput.low == near_to(clients * 8 / 0.75)
    assert found.requests_per_second == near_to(clients / 0.75)
    assert found.acceptance == 0.5
    assert found.tokens_per_round == 8 / 5


def test_percentiles_are_those_of_all_answers() -> None:
    number = iter(range(10**6))

    def answer(body: dict[str, Any], busy: int) -> Schedule:
        slow = next(number) % 10 + 1  # every run has each of the ten once
        return Schedule([(slow / 10, 1), *[(slow / 100, 1)] * 10])

    found = figure(*measured(answer, requests=10))
    assert found.between_tokens is not None
    # Of 0.1 to 1.0 twice each, between neighbours in proportion.
    for part, scale in ((found.first_token, 1), (found.between_tokens, 0.1)):
        assert part.p50 == near_to(0.55 * scale)
        assert part.p99 == near_to(1.0 * scale)
    assert found.first_token.p95 == near_to(1.0)  # place 18.05 of 0 to 19
    assert found.end_to_end.p50 == near_to(1.1)


def test_a_public_does_not_wait_and_comes_at_its_rate() -> None:
    stub = Stub(lambda body, busy: Schedule([(0.5, 1), (1.0, 1), (1.0, 2)]))
    plan, runs = measured(stubs=[stub], loads=(Open(4.0),), requests=60, repeats=1)
    asked = [when for when, _, _ in stub.asked[-60:]]
    seconds = asked[-1] + 2.5 - asked[0]
    found = figure(plan, runs)
    assert found.first_token.p99 == near_to(0.5)
    assert found.end_to_end.p99 == near_to(2.5)
    assert found.throughput.median == near_to(60 * 4 / seconds)
    assert found.requests_per_second == near_to(60 / seconds)
    assert stub.most > 5


def test_arrivals_are_poisson_and_the_same_for_everyone() -> None:
    async def due(number: int, when: float) -> float:
        return when

    times = run(drive(Open(4.0), due, 400, Random(1)))
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 4, rel=0.1)
    assert fmean(gap**2 for gap in gaps) == pytest.approx(2 / 4**2, rel=0.2)  # an exponential's
    again = run(drive(Open(4.0), due, 400, Random(1)))
    assert [b - a for a, b in pairwise(again)] == gaps


def test_clients_that_wait_are_never_more_than_they_are() -> None:
    stub = Stub(lambda body, busy: Schedule([(0.1 * busy, 1), (0.1, 8)]))
    measured(stubs=[stub], loads=(Closed(3),), requests=7)
    assert stub.most == 3


def test_servers_are_compared_within_a_repeat() -> None:
    """The second gets slower and slower, and takes the first along, as a machine does."""
    slower = iter(range(1, 10**6))
    pace = [1.0]

    def first(body: dict[str, Any], busy: int) -> Schedule:
        return Schedule([(0.2 * pace[0], 1), (0.1 * pace[0], 4)])

    def second(body: dict[str, Any], busy: int) -> Schedule:
        return Schedule([(0.4 * pace[0], 1), (0.1 * pace[0], 2), (0.1 * pace[0], 2)])

    class Slower(Stub):
        async def _answer(self, *request: Any) -> None:
            pace[0] = 1 + next(slower) // 10
            await super()._answer(*request)

    plan, runs = measured(stubs=[Slower(first), Slower(second)], repeats=6, requests=10)
    (ratio,) = ratios(runs, [target.name for target in plan.targets])
    assert (ratio.target, ratio.to) == ("server 0", "server 1")
    assert ratio.first_token.median == pytest.approx(0.5, rel=0.1)
    assert ratio.throughput.median == pytest.approx(2.0, rel=0.1)
    assert ratio.end_to_end.median == pytest.approx(0.5, rel=0.1)
    assert ratio.between_tokens is not None
    assert ratio.between_tokens.median == pytest.approx(0.5, rel=0.1)
    assert ratio.throughput.low <= ratio.throughput.median <= ratio.throughput.high


def test_all_servers_are_asked_the_same_and_none_the_same_twice() -> None:
    stubs = [Stub(lambda body, busy: DRAFTING) for _ in range(2)]
    measured(stubs=stubs)
    texts = [[body["messages"][0]["content"] for _, _, body in stub.asked] for stub in stubs]
    assert texts[0] == texts[1]
    assert len({text.split()[0] for text in texts[0]}) == len(texts[0]) == 1 + 3 * 4


def test_one_server_in_two_ways_is_not_asked_the_same() -> None:
    async def ways() -> list[dict[str, Any]]:
        stub = Stub(lambda body, busy: DRAFTING)
        async with stub as url:
            targets = [Target.of(f"{url}#num_draft_tokens=0&acceptance=ratio"), Target.of(f"{url}/v1/")]
            plan = Plan(targets, made_up(["short"]), repeats=1, requests=2)
            async for _ in measure(plan):
                pass
        return [body for _, _, body in stub.asked]

    bodies = run(ways())
    assert [body.get("num_draft_tokens") for body in bodies].count(0) == 5
    assert {body.get("acceptance") for body in bodies} == {"ratio", None}
    assert len({body["messages"][0]["content"].split()[0] for body in bodies}) == 10


def test_hits_have_a_beginning_that_was_sent_ahead() -> None:
    stub = Stub(lambda body, busy: DRAFTING)
    measured(stubs=[stub], questions=made_up(["medium"]), hits=(0.75,), requests=8, repeats=1)
    ahead, *texts = [body["messages"][0]["content"] for _, _, body in stub.asked[-9:]]
    begun = ahead.rsplit("\n\n", 1)[0]
    shared = [text for text in texts if text[:1000] == begun[:1000]]
    assert len(shared) == 6
    assert len(set(texts)) == 8
    assert [is_hit(number, 0.5) for number in range(4)] == [False, True, False, True]
    assert [is_hit(number, 1.0) for number in range(3)] == [True] * 3
    assert not any(is_hit(number, 0.0) for number in range(9))


@pytest.mark.parametrize("name", LENGTHS)
def test_prompts_have_their_number_of_words(name: str) -> None:
    stub = Stub(lambda body, busy: DRAFTING)
    measured(stubs=[stub], questions=made_up([name]), requests=2, repeats=1)
    for _, _, body in stub.asked:
        assert len(body["messages"][0]["content"].split()) == LENGTHS[name]


def test_prompts_that_are_given_are_sent_as_they_are() -> None:
    stub = Stub(lambda body, busy: DRAFTING)
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    given = Questions({"own": [Prompt("own", text="Go on from here"), Prompt("own", messages=chat)]})
    measured(stubs=[stub], questions=given, requests=2, repeats=1)
    assert [body["messages"] for _, _, body in stub.asked[-2:]] == [
        [{"role": "user", "content": "Go on from here"}],
        list(chat),
    ]


def test_answers_that_fail_are_counted_and_named_and_timed_by_nobody() -> None:
    number = iter(range(10**6))

    def answer(body: dict[str, Any], busy: int) -> Answer:
        return (503, {"error": {"message": "full"}}) if next(number) % 4 == 3 else DRAFTING

    plan, runs = measured(answer, requests=8)
    found = figure(plan, runs)
    assert found.errors == {"answered 503: full": 4}
    assert found.requests == 16
    assert found.end_to_end.p50 == near_to(0.75)
    assert found.throughput.median == near_to(8 / 0.75)
    text = report(plan, runs).markdown()
    assert "server 0, 4 of 16 requests: answered 503: full" in text


def test_a_server_that_stops_answering_ends_it_and_what_was_measured_stands() -> None:
    number, runs = iter(range(10**6)), list[Run]()

    async def collect() -> None:
        # One to see whether it answers, four to warm up, four that count.
        stub = Stub(lambda body, busy: DRAFTING if next(number) < 9 else Schedule([(0.1, 1)], end="stall"))
        async with stub as url:
            plan = Plan([Target.of(url, name="it")], made_up(["short"]), repeats=5, requests=4, timeout=30)
            async for each in measure(plan):
                runs.extend([each] if each else [])

    with pytest.raises(HeadstartError, match=r"it: no request was answered \(short, 1 at a time, 0% hits\): stalled"):
        run(collect())
    assert len(runs) == 1


def test_a_report_says_the_same_in_every_form(tmp_path: Path) -> None:
    slow = Schedule([(1.0, 1), (0.1, 1), (0.1, 1)], usage=None)
    plan, runs = measured(DRAFTING, slow, loads=(Closed(1), Closed(2), Open(1.0)), hits=(0.0, 0.5), repeats=1)
    told = report(plan, runs, "interrupted")
    text = told.markdown()
    assert "**Not complete: interrupted**" in text
    plain = " ".join(text.split())
    assert "| short | 0% | 1 at a time | server 0 | 500 / 500 / 500 | 40 / 40 / 40 | 0.75 / 0.75 / 0.75 |" in plain
    assert "| short | 0% | 1 at a time | server 0 | 10.7 | 10.7–10.7 | 1.33 | 77 | 7 | 8.0 | 50% | 1.60 |" in plain
    assert "server 1 does not count its tokens: chunks stand for them" in text
    assert "Nowhere is its throughput below" in text
    entry = json.loads(json.dumps(told.as_dict()))
    assert [(f["cell"]["concurrency"], f["cell"]["rate"], f["cell"]["hits"]) for f in entry["figures"][::2]] == [
        (1, None, 0.0), (2, None, 0.0), (None, 1.0, 0.0), (1, None, 0.5), (2, None, 0.5), (None, 1.0, 0.5),
    ]  # fmt: skip
    assert entry["stopped"] == "interrupted"
    assert entry["models"] == {"server 0": "stub", "server 1": "stub"}
    assert entry["ratios"][0]["first_token"]["median"] == near_to(0.5)
    lines = list(csv.DictReader(requests_csv(runs).splitlines()))
    assert len(lines) == sum(len(run.answers) for run in runs) == 2 * 6 * 4
    assert float(lines[0]["end_to_end"]) == pytest.approx(0.75 if lines[0]["server"] == "server 0" else 1.2, rel=0.02)
    drafted = next(line for line in lines if line["server"] == "server 0")
    assert (drafted["tokens"], drafted["accepted"], drafted["cached_tokens"]) == ("8", "3", "7")
    assert float(drafted["between_tokens"]) == near_to(0.24 / 7)
    plot(told, tmp_path / "load.svg")
    drawn = (tmp_path / "load.svg").read_text()
    for each in ("short: tokens/s in all", "short, 50% hits: ms between tokens", "server 1", "1 a second"):
        assert f"<!-- {each} -->" in drawn


def test_a_server_that_is_behind_is_said_to_be() -> None:
    plan, runs = measured(Schedule([(1.0, 1), (0.1, 1), (0.1, 1)]), DRAFTING)
    assert report(plan, runs).behind == [
        "throughput (short, 1 at a time, 0% hits, to server 1)",
        "first token (short, 1 at a time, 0% hits, to server 1)",
    ]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tokens": 2}, "--tokens is 2; give 8 or more"),
        ({"loads": (Closed(0),)}, "--concurrency must be above 0"),
        ({"loads": (Open(0.0),)}, "--rate must be above 0"),
        ({"hits": (1.5,)}, "--hits are shares"),
        ({"repeats": 0}, "--repeats and --requests must be 1 or more"),
        ({"targets": [Target.of("http://a"), Target.of("http://a")]}, "two servers are called a: .* --names"),
        ({"hits": (0.5,), "questions": Questions({"own": [Prompt("own", text="a")]})}, "leave out --prompts"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Plan(**{"targets": [Target.of("http://a")], "questions": made_up(["short"])} | plan)


def test_a_length_that_is_none_is_refused() -> None:
    assert made_up(["300"]).names == ["300 words"]
    with pytest.raises(RequestError, match="--lengths: 'tall' is not one of short, medium, long, nor a number"):
        made_up(["tall"])
