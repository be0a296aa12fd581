"""From the events of the engine to the output of each choice, and what the responses of both APIs share."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from ..engine import Event, Origin, Request, Stats, TokenLogprobs
from .loaded_model import LoadedModel
from .markup import Delta, merge
from .prompt import Prompt
from .request_fields import GenerationRequest, ProgressRequest

MIN_LOGPROB = -9999.0  # as OpenAI has it
PIECE = 2**16  # characters of a response that are sent at a time
MOST_IGNORED = 100  # fields that a response names, and characters of each: a body may have a hundred thousand

Events = AsyncIterator[Event]
Body = TypeVar("Body", bound=GenerationRequest)


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


@dataclass
class ResponseWriter(ABC, Generic[Body]):
    """Writes the response to one request in the format of one API."""

    body: Body
    prompt: Prompt  # the last one, where there are several requests
    served: LoadedModel
    requests: Sequence[Request]

    @abstractmethod
    def __post_init__(self) -> None:
        """Call `_begin` with what ids of this API begin with."""

    def _begin(self, id_prefix: str) -> None:
        self.id = f"{id_prefix}{uuid.uuid4().hex}"
        self.model_id = self.body.model  # in full
        prompt, body = self.prompt, self.body
        left_out = prompt.compiled.left_out if prompt.compiled is not None else []
        ignored = [*(f"{prompt.grammar_field}: {word}" for word in left_out), *body.ignored_fields()]
        more = [f"and {len(ignored) - MOST_IGNORED} more"] if len(ignored) > MOST_IGNORED else []
        self._ignored = [*(name[:MOST_IGNORED] for name in ignored[:MOST_IGNORED]), *more]
        self.outputs = [ChoiceOutput(prompt, i) for i in range(sum(each.n for each in self.requests))]
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
        """Yield how far a prompt is read, as llama.cpp's server says it, to clients that want to know: first, what it
        did not have to read. The output must not have read the event yet."""
        read = event.prompt_processed or event.tokens
        if not self._wants("return_progress") or not read or self.outputs[event.choice].stats.generation_tokens:
            return
        assert event.stats is not None
        total, cached = event.stats.prompt_tokens, event.stats.prefix_cache_hit
        begins, self._progressed = event.choice not in self._progressed, self._progressed | {event.choice}
        for processed in ([cached] if begins else []) + [event.prompt_processed or total]:
            passed = round(1000 * (time.perf_counter() - self._started))
            yield {"total": total, "cache": cached, "processed": processed, "time_ms": passed}

    def timings_per_token(self, output: ChoiceOutput) -> dict[str, Any]:
        """Return the field of a piece of text with the times so far, if the client wants it."""
        return {"timings": self.timings(output.stats)} if self._wants("timings_per_token") else {}

    def _wants(self, field: str) -> bool:
        return isinstance(self.body, ProgressRequest) and bool(getattr(self.body, field))

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

    def logprob(self, id: int, logprob: float) -> dict[str, Any]:
        """Return a token, and its log-probability: finite, since JSON has no infinity."""
        spelling = self.served.token_bytes(id)
        text = spelling.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(spelling)}

    def generation_stats(self, stats: Stats) -> dict[str, Any]:
        clamped = self.body.clamped_to(stats.clamped_to)
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
