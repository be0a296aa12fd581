"""From the events of the engine to the output of each choice, and what the responses of both APIs share."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from ..engine import Event, Origin, Stats, TokenLogprobs
from .chat import Prompt
from .markup import Delta, merge
from .request_fields import GenerationRequest
from .served_model import ServedModel

PIECE = 2**16  # characters of a response that are sent at a time

Events = AsyncIterator[Event]


class OutputToken(NamedTuple):
    id: int
    text: str  # as generated
    origin: Origin
    logprobs: TokenLogprobs | None  # if requested


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens and the deltas the parser released at them.

    A token whose text is held back has none; a later span then carries that text.
    """

    deltas: list[Delta] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)

    @classmethod
    def join(cls, spans: "list[TokenSpan]") -> "TokenSpan":
        deltas = merge(delta for span in spans for delta in span.deltas)
        return cls(deltas, [token for span in spans for token in span.tokens])


class ChoiceOutput:
    """The output of one choice so far, and what of it waits to be sent."""

    def __init__(self, prompt: Prompt, index: int = 0):
        self._parser = prompt.output_parser()  # None: all output is content
        self.index = index
        self.unsent: list[TokenSpan] = []
        self.sent_characters = 0
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None  # the engine's, or tool_calls
        self.stats = Stats(None, None)

    def read(self, event: Event) -> list[TokenSpan]:
        """Return a span for each token.

        At the end of a chat's answer, one more without a token has what the parser held back.
        """
        logprobs = event.logprobs or repeat(None)
        tokens = map(OutputToken, event.tokens, event.texts, event.origins, logprobs)
        spans = [TokenSpan(self._parse(token.text), [token]) for token in tokens]
        self.stats = event.stats or self.stats
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            if self._parser is not None:
                spans.append(TokenSpan(self._parser.finish()))
                if self._parser.calls and not self._parser.broken and self.finish_reason == "stop":
                    self.finish_reason = "tool_calls"
        return spans

    def _parse(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [Delta("content", text)] if text else []
        before = self._parser.thinking
        deltas = self._parser.feed(text)
        self.reasoning_tokens += before or self._parser.thinking  # markers count too
        return deltas


class ResponseWriter(ABC):
    """Writes the response to one request in the format of one API."""

    def __init__(self, body: GenerationRequest, prompt: Prompt, served: ServedModel, id_prefix: str):
        self.id = f"{id_prefix}{uuid.uuid4().hex}"
        self.prompt, self.served = prompt, served
        self.model_id = served.info.full_id(body.model)
        left_out = prompt.compiled.left_out if prompt.compiled is not None else []
        self._ignored = [*body.ignored_fields(), *(f"{prompt.grammar_field}: {word}" for word in left_out)]
        self._clamped_to = body.clamped_to
        self._started = time.perf_counter()
        self._progressed: set[int] = set()  # choices whose prompt's progress has been said

    @abstractmethod
    async def complete(self, events: Events) -> str:
        """Return the whole response as JSON."""

    @abstractmethod
    def stream(self, events: Events) -> AsyncIterator[str]:
        """Yield it as server-sent events."""

    def sign(self, done: int, total: int) -> str:
        """Return what a stream says where nothing has come for a while; `done` and `total` are tokens of prompts. A
        comment, which clients skip."""
        return f": prompt {done} of {total}\n\n"

    def prompt_progress(self, event: Event) -> Iterator[dict[str, int]]:
        """Yield how far a prompt is read, as llama.cpp's server says it: first, what it did not have to read."""
        assert event.stats is not None
        total, cached = event.stats.prompt_tokens, event.stats.prefix_cache_hit
        begins, self._progressed = event.choice not in self._progressed, self._progressed | {event.choice}
        for processed in ([cached] if begins else []) + [event.prompt_processed or total]:
            passed = round(1000 * (time.perf_counter() - self._started))
            yield {"total": total, "cache": cached, "processed": processed, "time_ms": passed}

    def timings(self, stats: Stats) -> dict[str, Any]:
        """Return the times of an answer as llama.cpp's server has them."""
        read, prompt_ms = stats.prompt_tokens - stats.prefix_cache_hit, 1000 * stats.prompt_seconds
        said, said_ms = stats.generation_tokens, 1000 * stats.generation_seconds
        return {
            "cache_n": stats.prefix_cache_hit,
            "prompt_n": read,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": round(prompt_ms / max(1, read), 3),
            "prompt_per_second": stats.prompt_tps,
            "predicted_n": said,
            "predicted_ms": round(said_ms, 3),
            "predicted_per_token_ms": round(said_ms / max(1, said), 3),
            "predicted_per_second": stats.generation_tps,
            "draft_n": stats.proposed_draft_tokens,
            "draft_n_accepted": stats.accepted_draft_tokens,
        }

    def generation_stats(self, stats: Stats) -> dict[str, Any]:
        clamped = self._clamped_to(stats.clamped_to)
        return stats.as_dict() | {
            "ignored_fields": self._ignored,
            "num_draft_tokens_clamped_to": clamped,
            "system_fingerprint": self.served.fingerprint.text,
        }


def encode_json(value: Any) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def json_response(text: str) -> Response:
    """Return a response whose body is JSON."""

    async def pieces() -> AsyncIterator[str]:
        for piece in in_pieces(text):
            yield piece
            await asyncio.sleep(0)

    if len(text) <= PIECE:
        return Response(text, media_type="application/json")
    return StreamingResponse(pieces(), media_type="application/json")


def in_pieces(*texts: str) -> Iterator[str]:
    """Yield texts as one, or in pieces where that is long. The event loop must be let go between them."""
    if sum(map(len, texts)) <= PIECE:
        yield "".join(texts)
        return
    for text in texts:
        yield from (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def new_id(prefix: str) -> str:
    """Return an id for a tool call."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"
