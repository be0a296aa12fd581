"""Many clients of a server, in a process of their own."""

import asyncio
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import httpx
import openai

CONCURRENT = 16


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


async def _load(url: str, known: list[Kind], count: int, seed: int, bad: float) -> Outcomes:
    outcomes, rng, places = Outcomes(), random.Random(seed), asyncio.Semaphore(CONCURRENT)
    known_as: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
    async with openai.AsyncOpenAI(**known_as) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:

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


def _run(*asked: Any) -> Outcomes:
    return asyncio.run(_load(*asked))


def load(url: str, known: list[Kind], count: int, seed: int, *, bad: float = 0.05) -> Outcomes:
    """`count` requests, never more than CONCURRENT at a time; a fifth leaves in mid-stream.

    In another process, as clients are. In the server's own, what they leave behind would be collected by whichever
    thread comes first, the engine's too, and an error there (pytest keeps it) would keep the engine's step alive.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as elsewhere:
        return elsewhere.submit(_run, url, known, count, seed, bad).result()
