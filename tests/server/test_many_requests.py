"""Many requests at once: each generates what it would alone, and nothing is left behind."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from clients import MALFORMED, Kind, Outcomes, load, send_malformed
from running import Running, alone, chat_tokens, running, tokenizer, wait_until

from headstart.kernels import Backend
from headstart.state import PrefixCache

APIS = ("completions", "chat", "messages", "responses")
PREFIX = list(tokenizer().encode("All of this comes before every question that is asked here. " * 60))[:600]


def kinds(*lengths: int, prefixed: bool) -> list[Kind]:
    """Greedy and seeded, with stop strings and fixed depths; some begin alike."""
    asked: list[tuple[list[int], dict[str, Any]]] = []
    for i, length in enumerate(lengths):
        prompt = list(tokenizer().encode(f"question {i} about number {i * i}:"))
        asked.append((prompt, {"max_tokens": length}))
        asked.append((prompt[:3], {"max_tokens": length, "temperature": 0.9, "seed": i, "top_p": 0.95}))
        asked.append((prompt[1:], {"max_tokens": length, "k": i, "presence_penalty": 0.7}))
        if prefixed:
            asked.append((PREFIX[: 512 + 20 * i] + prompt, {"max_tokens": length}))
    known = []
    for prompt, params in asked:
        text = alone(prompt, **params).text
        known.append(Kind(tuple(prompt), tuple(params.items()), text))
        if len(text) > 20:
            stop = text[12:15]
            known.append(Kind(tuple(prompt), (*params.items(), ("stop", [stop])), text[: text.find(stop)]))
    return known


def chats(*lengths: int) -> list[Kind]:
    """Greedy and seeded, by the three other APIs."""
    known = []
    for i, length in enumerate(lengths):
        said = f"Tell me about number {i * i}. " * (1 + 20 * (i % 3))
        for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": i}):
            params = {"max_tokens": length, "k": i % 4, **sampling}
            text = alone(chat_tokens(said), **params).text
            known += [Kind(said, tuple(params.items()), text, api) for api in APIS[1:] if "<" not in text]
    return known


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a step of several sequences fail now and then. A sequence that is alone would be the one to blame."""
    choose, steps, failed = Backend.choose, [0], []

    def sometimes(self: Backend, logits: Any, *rest: Any) -> Any:
        steps[0] += 1
        if logits.shape[0] > 1 and steps[0] >= 150 * (len(failed) + 1):
            failed.append(steps[0])
            raise ValueError("bad luck")
        return choose(self, logits, *rest)

    monkeypatch.setattr(Backend, "choose", sometimes)
    return failed


@pytest.mark.parametrize("body", MALFORMED)
def test_what_the_load_calls_malformed_is_refused(server: Running, body: bytes) -> None:
    async def refused() -> int:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await send_malformed(http, body)

    assert 400 <= asyncio.run(refused()) < 500


def idle(server: Running) -> bool:
    return server.room.running + server.room.prefilling + server.room.queued == 0


def check(server: Running, outcomes: Outcomes, count: int) -> None:
    assert outcomes.wrong == []
    assert sum(outcomes.counts[kind] for kind in ("whole", "streamed", "left", "malformed")) == count
    assert all(outcomes.counts[kind] > 0 for kind in ("whole", "streamed", "left")), outcomes.counts
    wait_until(lambda: idle(server))
    with server.http() as http:
        left = [id for id in outcomes.ids[-200:] if http.post(f"/v1/requests/{id}/cancel").status_code != 404]
        assert left == []
        assert http.get("/health").status_code == 200


def test_every_answer_of_a_mixed_load_is_what_it_would_be_alone() -> None:
    known = kinds(1, 9, 30, prefixed=True)
    with running(max_sequences=8, prefix=PrefixCache(10**8)) as server:
        check(server, load(server.url, known, 36, seed=1, bad=0.0), 36)
        assert server.metric("headstart_prefix_cache_hits_total") > 5


def resident() -> int:
    """Bytes of memory that this process holds, where the system reports them; else 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def endure(count: int) -> tuple[int, int]:
    """Growth of mlx's and the process's memory over `count` requests, after a hundred that warm up."""
    known, prefix = kinds(1, 3, 6, 9, 12, prefixed=True), PrefixCache(10**8)
    known += chats(2, 5, 8, 12)

    def held() -> tuple[int, int]:
        prefix.clear()  # what it keeps, it keeps on purpose
        gc.collect()  # what waits for the collector is no leak either
        mx.clear_cache()
        return mx.get_active_memory(), resident()

    with running(max_sequences=8, prefix=prefix) as server:
        check(server, load(server.url, known, 100, seed=2), 100)
        before = held()
        outcomes = load(server.url, known, count, seed=3)
        check(server, outcomes, count)
        assert outcomes.counts["malformed"] > count // 50
        assert all(outcomes.counts[api] > count // 50 for api in APIS), outcomes.counts
        assert server.metric("headstart_prefix_cache_hits_total") > count // 50
        after = held()
        return after[0] - before[0], after[1] - before[1]


@pytest.mark.slow
def test_two_hundred_requests_leave_nothing_behind(failing: list[int]) -> None:
    grown, _ = endure(200)
    assert grown < 200_000
    assert failing


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind(failing: list[int]) -> None:
    grown, resident = endure(10_000)
    assert len(failing) >= 10
    assert grown < 200_000
    assert resident < 100 * 2**20
