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
    """A request whose answer is known: token ids for completions, or what a user says, by one of the other APIs."""

    prompt: tuple[int, ...] | str
    params: tuple[tuple[str, Any], ...]
    text: str
    api: str = "completions"

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


class Clients:
    """The official clients of one server."""

    def __init__(self, url: str):
        known: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 600}
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **known)
        import anthropic  # takes seconds

        self.anthropic = anthropic.AsyncAnthropic(base_url=url, **known)

    async def ask(self, kind: Kind, stream: bool) -> Any:
        fields, said = dict(kind.fields), [{"role": "user", "content": kind.prompt}]
        if kind.api == "completions":
            create: Any = self.openai.completions.create
            return await create(model="tiny", prompt=list(kind.prompt), stream=stream, extra_body=fields)
        tokens = fields.pop("max_tokens")
        if kind.api == "messages":
            make: Any = self.anthropic.messages.create
            return await make(model="tiny", max_tokens=tokens, messages=said, stream=stream, extra_body=fields)
        if kind.api == "responses":
            respond: Any = self.openai.responses.create
            return await respond(
                model="tiny", max_output_tokens=tokens, input=said, stream=stream, store=tokens % 2 == 0,
                extra_body=fields,
            )  # fmt: skip
        chat: Any = self.openai.chat.completions.create
        return await chat(model="tiny", max_tokens=tokens, messages=said, stream=stream, extra_body=fields)


def whole_text(api: str, answer: Any) -> str:
    match api:
        case "completions":
            return str(answer.choices[0].text)
        case "messages":
            return "".join(block.text for block in answer.content)
        case "responses":
            return str(answer.output_text)
        case _:
            return answer.choices[0].message.content or ""


def text_of(api: str, event: Any) -> str | None:
    """What an event of a stream adds; None if it is of another kind."""
    match api:
        case "completions":
            return str(event.choices[0].text)
        case "messages":
            return str(event.delta.text) if event.type == "content_block_delta" else None
        case "responses":
            return str(event.delta) if event.type == "response.output_text.delta" else None
        case _:
            return event.choices[0].delta.content if event.choices else None


async def well_formed(
    clients: Clients, kind: Kind, stream: bool, leave_after: int | None, outcomes: Outcomes
) -> None:
    outcomes.counts[kind.api] += 1
    if not stream:
        text = whole_text(kind.api, await clients.ask(kind, False))
        outcomes.counts["whole"] += 1
        if text != kind.text:
            outcomes.wrong.append(f"{kind.api}: {text!r} instead of {kind.text!r}")
        return
    text, chunks = "", 0
    async with await clients.ask(kind, True) as events:
        async for event in events:
            if (more := text_of(kind.api, event)) is None:
                continue
            text, chunks = text + more, chunks + 1
            if chunks == 1 and kind.api == "completions":
                outcomes.ids.append(event.id)
            if chunks == leave_after:
                break
    outcomes.counts["streamed" if leave_after is None else "left"] += 1
    if not (text == kind.text if leave_after is None else kind.text.startswith(text)):
        outcomes.wrong.append(f"{kind.api}: {text!r} instead of {kind.text!r}")


async def _load(url: str, known: list[Kind], count: int, seed: int, bad: float) -> Outcomes:
    outcomes, rng, places = Outcomes(), random.Random(seed), asyncio.Semaphore(CONCURRENT)
    clients = Clients(url)
    async with clients.openai, clients.anthropic, httpx.AsyncClient(base_url=url, timeout=600) as http:

        async def one() -> None:
            async with places:
                lot = rng.random()
                if lot < bad:
                    await malformed(http, rng, outcomes)
                    return
                leave_after = rng.randint(1, 4) if lot < bad + 0.2 else None
                stream = leave_after is not None or rng.random() < 0.5
                kind = rng.choice(known)
                try:
                    await well_formed(clients, kind, stream, leave_after, outcomes)
                except Exception as error:  # the clients' errors cannot be pickled
                    outcomes.wrong.append(f"{kind.api}: {error!r}")

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
