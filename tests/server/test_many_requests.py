"""Many requests at once: each says what it would say alone, and nothing is left behind."""

import asyncio
import gc
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import openai
import pytest
from running import Running, alone, running, tokenizer, wait_until

from headstart.state import Prefix

CONCURRENT = 16
PREFIX = list(tokenizer().encode("All of this comes before every question that is asked here. " * 60))[:600]


@dataclass(frozen=True)
class Kind:
    """A request whose answer is known."""

    prompt: tuple[int, ...]
    params: tuple[tuple[str, Any], ...]
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        fields = dict(self.params)
        return fields | {"num_draft_tokens": fields.pop("k", "auto")}


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


@dataclass
class Outcomes:
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)  # of streams


MALFORMED = [
    b"{", b"[]", b"{}", b'{"prompt": 5}', b'{"prompt": "a", "temperature": "x"}', b'{"prompt": "a", "model": "b"}',
    b'{"prompt": "a", "max_tokens": 0}', b'{"prompt": [99999]}', b'{"prompt": "a", "n": 0}', b"\xff",
]  # fmt: skip


async def send_malformed(http: httpx.AsyncClient, body: bytes) -> int:
    response = await http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    return response.status_code


@pytest.mark.parametrize("body", MALFORMED)
def test_what_the_load_calls_malformed_is_refused(server: Running, body: bytes) -> None:
    async def refused() -> int:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await send_malformed(http, body)

    assert 400 <= asyncio.run(refused()) < 500


async def malformed(http: httpx.AsyncClient, rng: random.Random, outcomes: Outcomes) -> None:
    body = rng.choice(MALFORMED)
    status = await send_malformed(http, body)
    outcomes.counts["malformed"] += 1
    if not 400 <= status < 500:
        outcomes.wrong.append(f"{body!r} was answered {status}")


async def well_formed(
    client: openai.AsyncOpenAI, kind: Kind, stream: bool, leave_after: int | None, outcomes: Outcomes
) -> None:
    create: Any = client.completions.create
    if not stream:
        answer = await create(model="tiny", prompt=list(kind.prompt), extra_body=kind.fields)
        outcomes.counts["whole"] += 1
        if answer.choices[0].text != kind.text:
            outcomes.wrong.append(f"{answer.choices[0].text!r} instead of {kind.text!r}")
        return
    text, chunks = "", 0
    async with await create(model="tiny", prompt=list(kind.prompt), stream=True, extra_body=kind.fields) as events:
        async for chunk in events:
            text, chunks = text + chunk.choices[0].text, chunks + 1
            if chunks == 1:
                outcomes.ids.append(chunk.id)
            if chunks == leave_after:
                break
    outcomes.counts["streamed" if leave_after is None else "left"] += 1
    if not (text == kind.text if leave_after is None else kind.text.startswith(text)):
        outcomes.wrong.append(f"{text!r} instead of {kind.text!r}")


async def load(server: Running, known: list[Kind], count: int, seed: int, *, bad: float = 0.05) -> Outcomes:
    """`count` requests, never more than CONCURRENT at a time; a fifth leaves in mid-stream."""
    outcomes, rng, places = Outcomes(), random.Random(seed), asyncio.Semaphore(CONCURRENT)
    async with server.async_openai() as client, httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        async def one() -> None:
            async with places:
                lot = rng.random()
                if lot < bad:
                    await malformed(http, rng, outcomes)
                    return
                leave_after = rng.randint(1, 4) if lot < bad + 0.2 else None
                stream = leave_after is not None or rng.random() < 0.5
                await well_formed(client, rng.choice(known), stream, leave_after, outcomes)

        await asyncio.gather(*(one() for _ in range(count)))
    return outcomes


def idle(server: Running) -> bool:
    return server.room.running + server.room.entering + server.room.queued == 0


def check(server: Running, outcomes: Outcomes, count: int) -> None:
    assert outcomes.wrong == []
    assert outcomes.counts.total() == count
    assert all(outcomes.counts[kind] > 0 for kind in ("whole", "streamed", "left")), outcomes.counts
    wait_until(lambda: idle(server))
    with server.http() as http:
        left = [id for id in outcomes.ids[-200:] if http.post(f"/v1/requests/{id}/cancel").status_code != 404]
        assert left == []
        assert http.get("/health").status_code == 200


def test_every_answer_of_a_mixed_load_is_what_it_would_be_alone() -> None:
    known = kinds(1, 5, 9, 14, 22, 30, prefixed=True)
    with running(max_rows=8, prefix=Prefix(10**8)) as server:
        check(server, asyncio.run(load(server, known, 120, seed=1, bad=0.0)), 120)
        assert server.metric("headstart_prefix_cache_hits_total") > 10


def resident() -> int:
    """Bytes of memory that this process holds, where the system says so; else 0."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def endure(count: int) -> tuple[int, int]:
    """Growth of mlx's and the process's memory over `count` requests, after a hundred that warm up."""
    known, prefix = kinds(1, 3, 6, 9, 12, prefixed=True), Prefix(10**8)

    def held() -> tuple[int, int]:
        prefix.clear()  # what it keeps, it keeps on purpose
        gc.collect()  # what waits for the collector is no leak either
        mx.clear_cache()
        return mx.get_active_memory(), resident()

    with running(max_rows=8, prefix=prefix) as server:
        check(server, asyncio.run(load(server, known, 100, seed=2)), 100)
        before = held()
        outcomes = asyncio.run(load(server, known, count, seed=3))
        check(server, outcomes, count)
        assert outcomes.counts["malformed"] > count // 50
        assert server.metric("headstart_prefix_cache_hits_total") > count // 50
        after = held()
        return after[0] - before[0], after[1] - before[1]


def test_three_hundred_requests_leave_nothing_behind() -> None:
    grown, _ = endure(300)
    assert grown < 200_000


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    grown, resident = endure(10_000)
    assert grown < 200_000
    assert resident < 100 * 2**20
