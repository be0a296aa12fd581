"""What /metrics and /v1/mtp/stats count, compared with the answers' own stats."""

import asyncio
import re
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running import CONTEXT, Running, pooled_model, running, tiny, tokenizer, wait_until

from headstart.engine import DepthController, Engine, EngineThread, Event, FinishReason, Request, Stats
from headstart.engine.copies import CopyIndex
from headstart.engine.depth import Plan
from headstart.engine.draft import Source
from headstart.engine.draft_history import DraftHistory
from headstart.engine.request import Handle
from headstart.limits import MAX_K
from headstart.server.metrics import Meter, Metrics
from headstart.server.model_pool import ModelPool
from headstart.server.running_request import RunningRequest
from headstart.server.settings import Limits
from headstart.server.states import ServerState
from headstart.state import PrefixCache

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "http-api.md"
COMPLETIONS = "/v1/completions"


def parsed(text: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def samples(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with server.http() as http:
        told = parsed(http.get("/metrics").text)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in told}


class Copying(DepthController):
    """Copies wherever something repeats, with the head after that."""

    def plan(
        self,
        histories: Sequence[DraftHistory],
        copies: Sequence[CopyIndex | None],
        unread: int = 0,
        most: int = MAX_K,
    ) -> Plan:
        distances = tuple(each.distance if each is not None else 0 for each in copies)
        return super().plan(histories, copies, unread, most)._replace(k=3, source=Source.HEAD, distances=distances)


def test_counts_are_the_sums_of_all_answers_stats() -> None:
    with running(depth=Copying()) as server, server.http() as http:
        bodies: list[dict[str, Any]] = [
            {"prompt": "one", "max_tokens": 20, "min_tokens": 20},
            {"prompt": "two", "max_tokens": 30, "min_tokens": 30, "num_draft_tokens": 3},
            {"prompt": [5] * 40, "max_tokens": 30, "logit_bias": {"5": 100}},  # repeats itself
            {"prompt": "three", "max_tokens": 10, "min_tokens": 10, "num_draft_tokens": 0},
        ]
        told = [http.post(COMPLETIONS, json=body).json() for body in bodies]
        http.post(COMPLETIONS, json={"prompt": 5})
        stats, counted = [answer["generation_stats"] for answer in told], samples(server)
        report = http.get("/v1/mtp/stats").json()["models"]["tiny"]
        tokens = http.get("/v1/mtp/tokens").json()["models"]["tiny"]

    def count(name: str, **labels: str) -> float:
        labels = labels if name == "engine_healthy" else {"model": "tiny", **labels}
        return counted[f"headstart_{name}", frozenset(labels.items())]

    assert count("requests_total", endpoint=COMPLETIONS, outcome="length") == 4
    assert count("generation_tokens_total") == report["generation_tokens"] == 90
    assert count("prompt_tokens_total") == sum(answer["usage"]["prompt_tokens"] for answer in told)
    assert count("time_to_first_token_seconds_count") == 4
    assert report["rounds"] == sum(each["rounds"] for each in stats)
    assert report["tokens_per_round"] == pytest.approx(90 / report["rounds"])
    assert report["proposed_draft_tokens"] == sum(each["proposed_draft_tokens"] for each in stats)
    assert report["accepted_draft_tokens"] == sum(each["accepted_draft_tokens"] for each in stats) > 0
    for name in ("proposed", "accepted"):
        family = f"headstart_{name}_draft_tokens_total"
        assert sum(value for (each, _), value in counted.items() if each == family) == report[f"{name}_draft_tokens"]
    for depth in {depth for each in stats for depth in each["rounds_by_depth"]}:
        rounds = sum(each["rounds_by_depth"].get(depth, 0) for each in stats)
        assert count("rounds_total", depth=depth) == report["rounds_by_depth"][depth] == rounds
    assert report["bypasses"] == {"the request asked for no drafts": 1}
    assert count("bypasses_total", reason="the request asked for no drafts") == 1
    for source in ("head", "copy"):
        accepted = sum(each["accepted_by_source"][source] for each in stats)
        assert count("accepted_drafts_by_source_total", source=source) == accepted > 0
        assert report["accepted_by_source"][source] == accepted
    assert (tokens["5"], sum(tokens.values())) == (30, 90)  # nothing else was biased
    assert report["depth"] == 0
    assert count("engine_healthy") == 1


def test_latency_is_counted_by_tokens_and_not_by_chunks() -> None:
    """Otherwise drafts that are accepted together would look slow, or fast."""
    pool = ModelPool.of_one(EngineThread(Engine(tiny(True, CONTEXT), tokenizer())), pooled_model())
    metrics = Metrics(ServerState(pool), pool)
    meter = Meter(metrics, pool.models[0], COMPLETIONS, arrived=10.0)
    for rounds, tokens, said, when in ((1, 2, 2, 11.0), (2, 4, 6, 11.4), (3, 1, 7, 11.5)):
        stats = Stats("native_mtp", None, rounds=rounds, generation_tokens=said)
        meter.count(Event(tokens=[7] * tokens, stats=stats), when, first=True)
    counted = {sample.name: sample.value for sample in parsed(metrics.text().decode())}
    assert counted["headstart_time_to_first_token_seconds_count"] == 1
    assert counted["headstart_time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert counted["headstart_inter_token_seconds_count"] == 5
    assert counted["headstart_inter_token_seconds_sum"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("reasons", "outcome"),
    [
        (["stop"], "stop"),
        (["stop", "stop"], "stop"),
        (["stop", "length"], "length"),
        (["stop", "cancelled", "cancelled"], "cancelled"),
    ],
)
def test_a_request_for_several_answers_is_cut_off_if_one_is(reasons: list[FinishReason], outcome: str) -> None:
    room = EngineThread(Engine(tiny(True, CONTEXT), tokenizer()))
    pool = ModelPool.of_one(room, pooled_model())
    (model,) = pool.models

    async def main() -> None:
        room.submit = lambda request, **_: Handle(request, None)  # type: ignore[method-assign]
        request, meter = (
            Request([5], n=len(reasons)),
            Meter(Metrics(ServerState(pool), pool), model, COMPLETIONS, arrived=0.0),
        )
        running = RunningRequest(room, [request], Limits(), client="", deadline=inf, meter=meter)
        running.cancel()  # otherwise a cancelled answer is an error of the server's
        for choice, reason in enumerate(reasons):
            running._events.put_nowait((Event(finish_reason=reason, choice=choice), 1.0))
        assert len([event async for event in running.events()]) == len(reasons)
        running.close()

    asyncio.run(main())
    assert model.counters.requests == {(COMPLETIONS, outcome): 1}


def test_rows_and_queue_are_seen_while_they_last() -> None:
    with running(max_sequences=1) as server:
        create: Any = server.openai().completions.create
        fields: dict[str, Any] = {"model": "tiny", "prompt": "go on", "max_tokens": 3000, "stream": True}
        with create(**fields, extra_body={"min_tokens": 3000}), create(**fields):
            wait_until(lambda: server.metric("headstart_sequences", state="running") == 1)
            wait_until(lambda: server.metric("headstart_queued_requests") == 1)
        wait_until(lambda: server.metric("headstart_sequences", state="running") == 0)


def test_the_names_that_vllm_has_for_them() -> None:
    with running() as server:
        client = server.openai()
        for _ in range(2):
            client.completions.create(model="tiny", prompt="def add(a, b):" * 40, max_tokens=20, temperature=0)
        same = {
            "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
            "inter_token_latency_seconds_sum": "inter_token_seconds_sum",
            "prompt_tokens_total": "prompt_tokens_total",
            "generation_tokens_total": "generation_tokens_total",
            "prefix_cache_queries_total": "prompt_tokens_total",
            "prefix_cache_hits_total": "cached_prompt_tokens_total",
        }
        for name, ours in same.items():
            assert vllm(server, name) == server.metric(f"headstart_{ours}")
        proposed = [server.metric("headstart_proposed_draft_tokens_total", position=str(j)) for j in range(1, 16)]
        assert vllm(server, "spec_decode_num_draft_tokens_total") == sum(proposed) > 0
        assert 0 < vllm(server, "spec_decode_num_drafts_total") == proposed[0]
        assert vllm(server, "num_requests_running") == vllm(server, "num_requests_waiting") == 0
        with client.completions.create(model="tiny", prompt="a", max_tokens=4000, stream=True) as stream:
            next(iter(stream))
            assert vllm(server, "num_requests_running") == 1
            assert 0 < vllm(server, "kv_cache_usage_perc") <= 1


def vllm(server: Running, name: str) -> float:
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    (value,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f'vllm:{name}{{model_name="tiny"}}')]
    return float(value)


def test_every_metric_is_in_the_documentation() -> None:
    with running(prefix=PrefixCache(10**7)) as server, server.http() as http:
        http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, "min_tokens": 2, "num_draft_tokens": 0})
        names = re.findall(r"^# TYPE (\S+)", http.get("/metrics").text, re.MULTILINE)
    documented = set(re.findall(r"`((?:headstart_|vllm:)\w+)`", DOCS.read_text()))
    assert {name for name in names if not name.endswith("_created")} == documented
