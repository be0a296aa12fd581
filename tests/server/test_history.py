"""What /v1/history keeps, held against what /v1/mtp/stats counts."""

import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from running import Running, running, wait_until

import headstart.server.metrics

BODY = {"prompt": "go on", "max_tokens": 30, "min_tokens": 30, "num_draft_tokens": 3}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headstart.server.metrics, "INTERVAL", 0.05)


def recent(http: httpx.Client, after: float = 0) -> Any:
    return http.get("/v1/history", params={"after": after}).json()["models"]["tiny"]


def by_position(rows: list[list[int]]) -> list[int]:
    return [sum(row[j] for row in rows if j < len(row)) for j in range(max(map(len, rows)))]


def test_samples_add_up_to_what_was_counted() -> None:
    with running() as server, server.http() as http:
        for _ in range(3):
            http.post("/v1/completions", json=BODY)
        wait_until(lambda: sum(recent(http)["samples"]["generation_tokens"]) == 90)
        told, report = recent(http), http.get("/v1/mtp/stats").json()["models"]["tiny"]
    samples = told["samples"]
    assert sum(samples["rounds"]) == report["rounds"]
    assert sum(by_position(samples["proposed_by_position"])) == report["proposed_draft_tokens"]
    assert sum(by_position(samples["accepted_by_position"])) == report["accepted_draft_tokens"] > 0
    assert sum(samples["first_tokens"]) == 3
    assert sum(samples["first_token_seconds"]) > 0
    assert sum(samples["prompt_tokens"]) > 0
    assert told["controller"]["depth"] == report["depth"]
    assert all(seconds >= 0.05 for seconds in samples["seconds"])
    assert samples["time"] == sorted(samples["time"])
    assert len({len(column) for column in samples.values()}) == 1


def test_only_what_is_new_is_told() -> None:
    with running() as server, server.http() as http:
        wait_until(lambda: len(recent(http)["samples"]["time"]) > 3)
        times = recent(http)["samples"]["time"]
        assert recent(http, after=times[1])["samples"]["time"][: len(times) - 2] == times[2:]
        assert recent(http, after=times[-1] + 3600)["samples"]["time"] == []


def test_it_forgets_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headstart.server.metrics, "KEPT", 3)
    with running() as server, server.http() as http:
        wait_until(lambda: recent(http)["samples"]["time"])
        first = recent(http)["samples"]["time"][0]
        wait_until(lambda: recent(http)["samples"]["time"][0] > first)
        assert len(recent(http)["samples"]["time"]) == 3


def test_a_sample_that_fails_is_logged_and_the_next_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as server, server.http() as http:
        wait_until(lambda: recent(http)["samples"]["time"])
        with monkeypatch.context() as broken:
            broken.setattr(headstart.server.metrics, "mx", None)
            wait_until(lambda: "a sample of the history failed" in caplog.text)
            last = recent(http)["samples"]["time"][-1]
        http.post("/v1/completions", json=BODY)
        wait_until(lambda: recent(http, after=last)["samples"]["time"])
        wait_until(lambda: sum(recent(http)["samples"]["generation_tokens"]) == 30)


def test_a_clock_that_is_set_back_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server, server.http() as http:
        wait_until(lambda: recent(http)["samples"]["time"])
        late = SimpleNamespace(time=lambda: time.time() - 3600, perf_counter=time.perf_counter)
        monkeypatch.setattr(headstart.server.metrics, "time", late)
        last = recent(http)["samples"]["time"][-1]
        wait_until(lambda: len(recent(http, after=last)["samples"]["time"]) > 2)
        times = recent(http)["samples"]["time"]
        assert times == sorted(set(times))
        assert times[-1] - times[0] < 60


def test_rows_and_queue_are_seen_while_they_last() -> None:
    with running(max_sequences=1) as server, server.http() as http:
        create: Any = server.openai().completions.create
        fields: dict[str, Any] = {"model": "tiny", "prompt": "go on", "max_tokens": 3000, "stream": True}
        with create(**fields, extra_body={"min_tokens": 3000}), create(**fields):
            wait_until(lambda: {1} <= set(recent(http)["samples"]["running"]))
            wait_until(lambda: {1} <= set(recent(http)["samples"]["queued"]))
        wait_until(lambda: recent(http)["samples"]["running"][-1] == 0)
        gains = recent(http)["controller"]["gains"]
        assert gains[0] == 1
        assert len(gains) == server.served.model.max_k + 1


def test_a_time_that_is_none_is_refused_by_its_name(server: Running) -> None:
    with server.http() as http:
        refused = http.get("/v1/history", params={"after": "yesterday"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
