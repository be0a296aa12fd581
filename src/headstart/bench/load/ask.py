"""Ask a server one thing, and note when what arrives."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from ...errors import HeadstartError
from ..prompts import Prompt
from .answer import Answer, Counted, Drafts, apportion, arrivals
from .target import Target, reason, refusal

Count = Callable[[str], int]  # tokens of a text

TOGETHER = 0.0005  # seconds: chunks that a server sent at once are read one after another


class Failed(HeadstartError):
    """An answer that is none."""


@dataclass
class Piece:
    """Text that came at one time."""

    when: float
    text: str
    tokens: int = 0  # where the stream counts as it goes


@dataclass
class Heard:
    """A stream so far, and what it tells of itself."""

    pieces: list[Piece] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)
    ended: float | None = None
    _counted: int = 0  # tokens before the present piece, by the usage
    _origins: int = 0  # since then

    def take(self, chunk: dict[str, Any], when: float) -> None:
        if "error" in chunk:
            raise Failed(refusal(200, json.dumps(chunk).encode()))
        self.usage = chunk.get("usage") or self.usage
        self.stats = chunk.get("generation_stats") or self.stats
        for choice in chunk.get("choices") or ():
            self._origins += len(choice.get("origins") or ())
            if text := _text(choice):
                self._add(text, when)
            if choice.get("finish_reason") is not None:
                self.ended = when

    def _add(self, text: str, when: float) -> None:
        if not self.pieces or when - self.pieces[-1].when > TOGETHER:
            self.pieces.append(Piece(when, ""))
        self.pieces[-1].text += text
        self.pieces[-1].tokens += self._origins or max(self._said - self._counted, 0)
        self._counted, self._origins = self._said, 0

    @property
    def _said(self) -> int:
        """The sum at the end; some servers have it in every chunk."""
        return self.usage.get("completion_tokens") or 0

    def answer(self, asked: float, count: Count | None) -> Answer:
        if self.ended is None:
            raise Failed("the stream broke off")
        if not self.pieces:
            raise Failed("an answer without a word")
        tokens, counted = self._tokens(count)
        return Answer(
            asked=asked,
            ended=self.ended,
            arrivals=arrivals([piece.when for piece in self.pieces], tokens),
            counted=counted,
            prompt_tokens=self.usage.get("prompt_tokens"),
            cached_tokens=(self.usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            drafts=_drafts(self.usage, self.stats),
        )

    def _tokens(self, count: Count | None) -> tuple[list[int], Counted]:
        if all(piece.tokens for piece in self.pieces):
            return [piece.tokens for piece in self.pieces], "usage"
        sizes = [count(piece.text) if count else len(piece.text) for piece in self.pieces]
        if self._said:
            return apportion(self._said, sizes), "usage"
        return (sizes, "tokenizer") if count else ([1] * len(sizes), "chunks")


async def ask(
    http: httpx.AsyncClient,
    target: Target,
    prompt: Prompt,
    tokens: int,
    *,
    asked: float | None = None,
    count: Count | None = None,
) -> Answer:
    """An answer, or how it failed. `asked` is when it was due, on the clock of the loop; `count` counts where the
    server does not."""
    loop, heard = asyncio.get_running_loop(), Heard()
    asked = loop.time() if asked is None else asked
    path = "chat/completions" if target.chat else "completions"
    try:
        async with http.stream("POST", f"{target.url}/{path}", json=_body(target, prompt, tokens)) as response:
            if response.status_code != 200:
                raise Failed(refusal(response.status_code, await response.aread()))
            kind = response.headers.get("Content-Type", "")
            if not kind.startswith("text/event-stream"):
                raise Failed(f"not a stream, but {kind or 'something'}")
            async for event in _events(response):
                if event is None:
                    heard.ended = loop.time()
                else:
                    heard.take(event, loop.time())
        return heard.answer(asked, count)
    except httpx.HTTPError as error:
        return Answer(asked, loop.time(), error=reason(error))
    except Failed as error:
        return Answer(asked, loop.time(), error=str(error))
    except (AttributeError, TypeError) as error:  # a list where an object belongs, or the like
        return Answer(asked, loop.time(), error=f"a chunk that is not in OpenAI's shape: {error}")


def _body(target: Target, prompt: Prompt, tokens: int) -> dict[str, Any]:
    text = prompt.text or "\n\n".join(message["content"] for message in prompt.messages)
    messages = list(prompt.messages) or [{"role": "user", "content": text}]
    return {
        "model": target.model,
        **({"messages": messages} if target.chat else {"prompt": text}),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.body,
    }


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """Chunks, and None for [DONE]. Lines may be cut anywhere; those that are not data are comments."""
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
        raise Failed(f"a chunk that is not a JSON object: {data[:80].decode(errors='replace')!r}")
    return chunk


def _text(choice: dict[str, Any]) -> str:
    """Everything that was written: thoughts and calls of tools are tokens too."""
    delta = choice.get("delta") or {}
    said = [choice.get("text"), delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        said += [function.get("name"), function.get("arguments")]
    return "".join(each for each in said if each)


def _drafts(usage: dict[str, Any], stats: dict[str, Any]) -> Drafts | None:
    if "proposed_draft_tokens" in stats:
        return Drafts(stats["proposed_draft_tokens"], stats["accepted_draft_tokens"], stats.get("rounds"))
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    if accepted is None or rejected is None or not accepted + rejected:
        return None
    return Drafts(accepted + rejected, accepted)
