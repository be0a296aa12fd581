"""Send one request to a server and note when its tokens arrive.

A server that drafts sends several tokens in one chunk. Latency is counted per token, not per chunk: the tokens of a
chunk share the time since the chunk before it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import pairwise
from typing import Any, Literal

import httpx

from ..errors import HeadstartError
from .prompts import BenchPrompt
from .server import BenchServer, describe_failure, describe_http_error

TOGETHER = 0.0005  # seconds: chunks that were sent at once are read one after another


class InvalidStream(HeadstartError):
    """A response that is not a complete stream of OpenAI chunks."""


@dataclass(frozen=True)
class TimedResponse:
    """Times are seconds on the event loop's clock."""

    due: float  # when the request should have been sent: a client that falls behind must not hide that the server did
    ended: float
    arrivals: tuple[tuple[float, int], ...] = ()  # time, tokens
    counted: Literal["usage", "chunks"] = "chunks"  # who counted the tokens; chunks are right only where each is one
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    proposed: int = 0  # draft tokens, where the server reports them
    accepted: int = 0
    rounds: int = 0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.due

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens, except those that came with the first."""
        return [(now - before) / count for (before, _), (now, count) in pairwise(self.arrivals) for _ in range(count)]


@dataclass
class StreamReader:
    """Collect the chunks of one stream."""

    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)  # completion tokens so far; some servers tell in every chunk
    usage: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)  # headstart's generation_stats
    ended: float | None = None

    def add(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            raise InvalidStream(describe_failure(200, json.dumps(chunk).encode()))
        self.usage = chunk.get("usage") or self.usage
        self.stats = chunk.get("generation_stats") or self.stats
        for choice in chunk.get("choices") or ():
            if text := _text(choice):
                if not self.times or now - self.times[-1] > TOGETHER:
                    self.times.append(now)
                    self.texts.append("")
                    self.totals.append(0)
                self.texts[-1] += text
                self.totals[-1] = self.usage.get("completion_tokens") or 0
            if choice.get("finish_reason") is not None:
                self.ended = now

    def response(self, due: float) -> TimedResponse:
        if self.ended is None:
            raise InvalidStream("the stream ended without a finish reason or [DONE]")
        if not self.times:
            raise InvalidStream("the response has no text")
        total = self.usage.get("completion_tokens") or 0
        if all(self.totals):
            counts = [now - before for before, now in pairwise([0, *self.totals])]
        else:
            counts = apportion(total or len(self.times), [len(text) for text in self.texts])
        counts[0] = max(counts[0], 1)
        arrivals = tuple((time, count) for time, count in zip(self.times, counts, strict=True) if count)
        proposed, accepted, rounds = self._drafts()
        return TimedResponse(
            due=due,
            ended=self.ended,
            arrivals=arrivals,
            counted="usage" if total else "chunks",
            prompt_tokens=self.usage.get("prompt_tokens"),
            cached_tokens=(self.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            proposed=proposed,
            accepted=accepted,
            rounds=rounds,
        )

    def _drafts(self) -> tuple[int, int, int]:
        """Return drafts proposed, drafts accepted and rounds, 0 where the server does not report them."""
        if "proposed_draft_tokens" in self.stats:
            stats = self.stats
            return stats["proposed_draft_tokens"], stats["accepted_draft_tokens"], stats.get("rounds") or 0
        details = self.usage.get("completion_tokens_details") or {}
        accepted = details.get("accepted_prediction_tokens") or 0
        return accepted + (details.get("rejected_prediction_tokens") or 0), accepted, 0


def apportion(total: int, sizes: Sequence[int]) -> list[int]:
    """Share `total` tokens among chunks: one each, as most servers send them, and each further one to the chunk with
    most text for its tokens (the method of Sainte-Laguë)."""
    if total <= len(sizes):  # the text of a token may come in two chunks: the later one has it
        ends = [(i + 1) * total // len(sizes) for i in range(len(sizes))]
        return [end - start for start, end in pairwise([0, *ends])]
    counts = [1] * len(sizes)
    largest = [(-size / 3, i) for i, size in enumerate(sizes)]
    heapify(largest)
    for _ in range(total - len(sizes)):
        i = largest[0][1]
        counts[i] += 1
        heapreplace(largest, (-sizes[i] / (2 * counts[i] + 1), i))
    return counts


async def send_request(
    http: httpx.AsyncClient, server: BenchServer, prompt: BenchPrompt, tokens: int, *, due: float | None = None
) -> TimedResponse:
    """Return the response, or how it failed. `due`: when it should have been sent, on the event loop's clock."""
    loop = asyncio.get_running_loop()
    reader = StreamReader()
    due = loop.time() if due is None else due
    path = "chat/completions" if server.chat else "completions"
    try:
        async with http.stream("POST", f"{server.url}/{path}", json=_body(server, prompt, tokens)) as response:
            if response.status_code != 200:
                raise InvalidStream(describe_failure(response.status_code, await response.aread()))
            kind = response.headers.get("Content-Type", "")
            if not kind.startswith("text/event-stream"):
                raise InvalidStream(f"not a stream, but {kind or 'no content type'}")
            async for event in _events(response):
                if event is None:
                    reader.ended = loop.time()
                else:
                    reader.add(event, loop.time())
        return reader.response(due)
    except httpx.HTTPError as error:
        failure = describe_http_error(error)
    except InvalidStream as error:
        failure = str(error)
    except (AttributeError, TypeError) as error:  # a list where an object belongs, for instance
        failure = f"a chunk is not in OpenAI's format: {error}"
    return TimedResponse(due, loop.time(), error=failure)


def _body(server: BenchServer, prompt: BenchPrompt, tokens: int) -> dict[str, Any]:
    messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
    return {
        "model": server.model,
        **({"messages": messages} if server.chat else {"prompt": prompt.as_text}),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.body,
    }


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """Yield chunks, and None for [DONE]. A read may end in the middle of a line; other lines are comments."""
    rest = b""
    async for piece in response.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                yield None if data == b"[DONE]" else _chunk(data)


def _chunk(data: bytes) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise InvalidStream(f"a chunk is not a JSON object: {data[:80].decode(errors='replace')!r}")
    return chunk


def _text(choice: dict[str, Any]) -> str:
    """Return everything a chunk adds: reasoning and tool calls are tokens too."""
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if part)
