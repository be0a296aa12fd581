"""From the events of the engine to the output of each choice, and what the responses of both APIs share."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from ..engine import Event, Origin, Stats, TokenLogprobs
from .markup import Delta, OutputParser, merge
from .prompt import Prompt
from .request_fields import GenerationRequest
from .served_model import ServedModel

Events = AsyncIterator[Event]


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens and what they add to the message: nothing yet, or text of tokens before them too."""

    deltas: list[Delta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # as generated
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(
        default_factory=list
    )  # if requested; a prompt's first token has none

    @classmethod
    def join(cls, spans: "list[TokenSpan]") -> "TokenSpan":
        return cls(
            merge(delta for span in spans for delta in span.deltas),
            [token for span in spans for token in span.tokens],
            [text for span in spans for text in span.texts],
            [origin for span in spans for origin in span.origins],
            [logprobs for span in spans for logprobs in span.logprobs],
        )


class ChoiceOutput:
    """The output of one choice so far."""

    def __init__(self, parser: OutputParser | None, index: int = 0):
        self._parser = parser  # None: all output is content
        self.index = index
        self.reasoning_tokens = 0
        self.finish_reason: str | None = None  # the engine's, or tool_calls
        self.stats = Stats(None, None)

    def read(self, event: Event) -> list[TokenSpan]:
        """Return a span for each token of an event. The last one has what the parser held back."""
        spans = []
        for i, (token, text) in enumerate(zip(event.tokens, event.texts, strict=True)):
            logprobs = [event.logprobs[i]] if event.logprobs is not None else []
            spans.append(TokenSpan(self._parse(text), [token], [text], [event.origins[i]], [*logprobs]))
        self.stats = event.stats or self.stats
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            if self._parser is not None:
                spans.append(TokenSpan(self._parser.finish()))
                if self._parser.called and self.finish_reason == "stop":
                    self.finish_reason = "tool_calls"
        return spans

    def _parse(self, text: str) -> list[Delta]:
        if self._parser is None:
            return [Delta("content", text)] if text else []
        before = self._parser.thinking
        deltas = self._parser.feed(text)
        self.reasoning_tokens += before or self._parser.thinking  # markers count too
        return deltas


class ResponseBuilder(ABC):
    """Builds the response to one request in the format of one API."""

    def __init__(self, body: GenerationRequest, prompt: Prompt, served: ServedModel, id_prefix: str):
        self.id = f"{id_prefix}{uuid.uuid4().hex}"
        self.prompt, self.served = prompt, served
        self._ignored = sorted([*body.ignored_fields(), *prompt.ignored])
        self._clamped_to = body.clamped_to

    @abstractmethod
    async def complete(self, events: Events) -> str:
        """Return the whole response as JSON."""

    @abstractmethod
    def stream(self, events: Events) -> AsyncIterator[str]:
        """Yield it as server-sent events."""

    def generation_stats(self, stats: Stats) -> dict[str, Any]:
        clamped = self._clamped_to(stats.clamped_to)
        return stats.as_dict() | {"ignored_fields": self._ignored, "num_draft_tokens_clamped_to": clamped}


def encode_json(value: Any) -> str:
    return to_json(value, inf_nan_mode="null").decode()


def new_id(prefix: str) -> str:
    """Return an id for a tool call."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"
