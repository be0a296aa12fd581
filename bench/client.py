"""A server to benchmark, and one request to it: when its tokens arrive, or how it fails.

A server that drafts sends several tokens in one chunk. Latency is counted per token, not per chunk: the tokens of a
chunk share the time since the chunk before it.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

import httpx

from headstart.bench.prompts import BenchPrompt
from headstart.errors import HeadstartError, RequestError

SET_BY_BENCH = {"messages", "prompt", "max_tokens", "stream", "stream_options"}
SAME_ARRIVAL = 0.0005  # seconds: chunks that were sent at once are read one after another


@dataclass(frozen=True)
class BenchServer:
    name: str
    url: str  # up to and including /v1
    model: str | None = None  # None: the only one it serves
    key: str | None = field(default=None, repr=False)
    chat: bool = True  # /chat/completions; else /completions
    body: dict[str, Any] = field(default_factory=dict)  # further fields of every request

    @classmethod
    def parse(cls, text: str, *, model: str | None = None, chat: bool = True) -> "BenchServer":
        """Parse `[NAME=]URL[#FIELD=VALUE&…]`. The fields go into every request body, so that one server can be
        compared with itself, such as #num_draft_tokens=0."""
        name, address = re.fullmatch(r"(?:([^=:/#]+)=)?(.*)", text).groups()  # type: ignore[union-attr]
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(f"--url {text}: not a URL; give one such as http://127.0.0.1:8000")
        try:
            fields = parse_qsl(parts.fragment, keep_blank_values=True, strict_parsing=bool(parts.fragment))
        except ValueError as error:
            raise RequestError(f"--url {text}: write fields after # as name=value, joined by &") from error
        body = {field: value if field == "model" else _json_or_text(value) for field, value in fields}
        if wrong := SET_BY_BENCH & body.keys():
            raise RequestError(f"--url {text}: {min(wrong)} cannot be set after #, the benchmark sets it")
        return cls(
            name=name or f"{parts.netloc}{'#' if fields else ''}{parts.fragment}",
            url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}",
            model=body.pop("model", model),
            chat=chat,
            body=body,
        )

    def client(self, timeout: float) -> httpx.AsyncClient:
        """Return a client that waits `timeout` seconds for data. Connections are not limited: requests would queue in
        the client otherwise, unseen by the server."""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(timeout, connect=10))

    async def with_model(self, http: httpx.AsyncClient) -> "BenchServer":
        """Return this server with the name of its model, or raise why it cannot be measured."""
        try:
            response = await http.get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise HeadstartError(f"{self.url}: {_describe_http_error(error)}: is the server running?") from error
        if response.status_code in (401, 403):
            failure = _describe_response(response.status_code, response.content)
            raise HeadstartError(f"{self.url}: {failure}: give its --api-key")
        if self.model is not None:
            return self
        try:
            served = [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            served = []
        if len(served) != 1:
            known = f"it serves {', '.join(served)}" if served else "it does not list its models"
            raise HeadstartError(f"{self.url}: give the name of the MODEL to measure; {known}")
        return replace(self, model=served[0])


class InvalidStream(HeadstartError):
    """A response that is not a complete stream of OpenAI chunks."""


@dataclass
class TimedResponse:
    """A response as it arrives. Times are seconds on the event loop's clock."""

    due: float  # when the request should have been sent: a client that falls behind must not hide that the server did
    ended: float | None = None
    error: str | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time and tokens; characters until the end
    counted: Literal["usage", "chunks"] = "chunks"  # who counted the tokens; chunks are right only where each is one
    usage: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)  # headstart's generation_stats

    def add(self, chunk: dict[str, Any], now: float) -> None:
        if "error" in chunk:
            raise InvalidStream(_describe_response(200, json.dumps(chunk).encode()))
        self.usage = dict(chunk.get("usage") or self.usage)
        self.stats = dict(chunk.get("generation_stats") or self.stats)
        for choice in chunk.get("choices") or ():
            if size := _text_size(choice):
                if self.arrivals and now - self.arrivals[-1][0] <= SAME_ARRIVAL:
                    now, before = self.arrivals.pop()
                    size += before
                self.arrivals.append((now, size))
            if choice.get("finish_reason") is not None:
                self.ended = now

    def count_tokens(self) -> None:
        """Turn the characters that arrived into tokens, once the stream is complete."""
        if self.ended is None:
            raise InvalidStream("the stream ended without a finish reason or [DONE]")
        if not self.arrivals:
            raise InvalidStream("the response has no text")
        total = self.usage.get("completion_tokens") or 0
        times, sizes = zip(*self.arrivals, strict=True)
        counts = apportion(total or len(times), sizes)
        counts[0] = max(counts[0], 1)
        self.arrivals = [(time, count) for time, count in zip(times, counts, strict=True) if count]
        self.counted = "usage" if total else "chunks"

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.due

    @property
    def e2e(self) -> float:
        return (self.ended or self.due) - self.due

    @property
    def gaps(self) -> list[float]:
        """Return the seconds between tokens, except those that came with the first."""
        return [(now - before) / count for (before, _), (now, count) in pairwise(self.arrivals) for _ in range(count)]

    @property
    def drafts(self) -> tuple[int, int, int]:
        """Return drafts proposed, drafts accepted and rounds: 0 where the server does not report them."""
        if stats := self.stats:
            return stats["proposed_draft_tokens"], stats["accepted_draft_tokens"], stats["rounds"]
        details = self.usage.get("completion_tokens_details") or {}
        accepted = details.get("accepted_prediction_tokens") or 0
        return accepted + (details.get("rejected_prediction_tokens") or 0), accepted, 0


def apportion(total: int, sizes: Sequence[int]) -> list[int]:
    """Share `total` tokens among chunks by the length of their text, at least one each. Of fewer tokens than chunks
    the later chunks have them: the text of a token may come in two chunks."""
    ends = [0]
    for number, text in enumerate(accumulate(sizes), 1):
        if total <= len(sizes):
            ends.append(number * total // len(sizes))
        else:
            fair = round(total * text / sum(sizes))
            ends.append(min(max(fair, ends[-1] + 1), total - (len(sizes) - number)))
    return [end - start for start, end in pairwise(ends)]


async def send_request(
    http: httpx.AsyncClient, server: BenchServer, prompt: BenchPrompt, tokens: int, *, due: float | None = None
) -> TimedResponse:
    """Return the response, or how it failed. `due`: when it should have been sent, on the event loop's clock."""
    loop = asyncio.get_running_loop()
    response = TimedResponse(loop.time() if due is None else due)
    path = "chat/completions" if server.chat else "completions"
    try:
        async with http.stream("POST", f"{server.url}/{path}", json=_body(server, prompt, tokens)) as stream:
            if stream.status_code != 200:
                raise InvalidStream(_describe_response(stream.status_code, await stream.aread()))
            kind = stream.headers.get("Content-Type", "")
            if not kind.startswith("text/event-stream"):
                raise InvalidStream(f"not a stream, but {kind or 'no content type'}")
            async for chunk in _chunks(stream):
                if chunk is None:
                    response.ended = loop.time()
                else:
                    response.add(chunk, loop.time())
        response.count_tokens()
        return response
    except httpx.HTTPError as error:
        failure = _describe_http_error(error)
    except InvalidStream as error:
        failure = str(error)
    except (AttributeError, TypeError, ValueError) as error:  # a list where an object belongs, for instance
        failure = f"a chunk is not in OpenAI's format: {error}"
    return TimedResponse(response.due, loop.time(), failure)


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


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """Yield chunks, and None for [DONE]. Lines that hold no data are comments."""
    rest = b""
    async for piece in response.aiter_raw():  # not aiter_lines, which also splits at line separators within a text
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip().decode(errors="replace")
                chunk = None if data == "[DONE]" else _json_or_text(data)
                if not isinstance(chunk, dict | None):
                    raise InvalidStream(f"a chunk is not a JSON object: {data[:80]!r}")
                yield chunk


def _text_size(choice: dict[str, Any]) -> int:
    """Return how many characters a chunk adds: reasoning and tool calls are tokens too."""
    delta = choice.get("delta") or {}
    parts = [choice.get("text"), delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return sum(len(part) for part in parts if part)


def _describe_http_error(error: httpx.HTTPError) -> str:
    match error:
        case httpx.ConnectTimeout():
            return "no connection within 10 s"
        case httpx.TimeoutException():
            return "no data received within --timeout"
        case httpx.ConnectError():
            return "cannot be reached"
        case _:
            return f"connection lost: {error or type(error).__name__}"


def _describe_response(status: int, content: bytes) -> str:
    """Return the message of an error response, in OpenAI's format, in mlx-lm's, or plain text."""
    error = _json_or_text(content.decode(errors="replace").strip())
    for name in ("error", "message"):
        error = error.get(name, error) if isinstance(error, dict) else error
    return f"answered {status}: {str(error)[:300]}"


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
