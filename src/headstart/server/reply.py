"""What OpenAI's clients are answered: whole, or in chunks as it comes."""

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from ..engine import Event, Origin, Stats
from .answer import Answer
from .errors import refusal
from .openai import Asked, ChatRequest

Kind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, stats: Stats) -> "Usage":
        accepted, proposed = stats.accepted_draft_tokens, stats.proposed_draft_tokens
        return cls(
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.generation_tokens,
            total_tokens=stats.prompt_tokens + stats.generation_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=stats.prefix_cache_hit),
            completion_tokens_details=CompletionDetails(
                reasoning_tokens=0,
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=proposed - accepted,
            ),
        )


class Said(BaseModel):
    """A message, or what a chunk adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class Choice(BaseModel):
    """Of a chat it has a message or a delta, of a completion a text."""

    index: int = 0
    message: Said | None = None
    delta: Said | None = None
    text: str | None = None
    logprobs: None = None
    finish_reason: str | None = None
    origins: list[Origin] | None = None


class Completion(BaseModel):
    """A whole answer or a chunk of one. Only what is set is sent."""

    id: str
    object: Kind
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    generation_stats: dict[str, Any] | None = None


@dataclass(frozen=True)
class Reply:
    """One answer in the shape that its request asked for."""

    asked: Asked
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def chat(self) -> bool:
        return isinstance(self.asked, ChatRequest)

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.chat else 'cmpl'}-{self.key}"

    async def whole(self, answer: Answer) -> Completion:
        text, origins, last = "", list[Origin](), Event()
        async for last in answer.events():
            text += "".join(last.texts)
            origins += last.origins
        assert last.stats is not None
        choice = self._choice(text, origins, last.finish_reason, part=False)
        object_: Kind = "chat.completion" if self.chat else "text_completion"
        return Completion(
            **self._envelope(object_, [choice]), usage=Usage.of(last.stats), generation_stats=self._stats(last.stats)
        )

    async def stream(self, answer: Answer) -> AsyncIterator[str]:
        """Server-sent events. An error is one of them, since the status has been sent by then."""
        try:
            async for chunk in self._chunks(answer):
                yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        except Exception as error:
            yield refusal(error).event
        yield "data: [DONE]\n\n"

    async def _chunks(self, answer: Answer) -> AsyncIterator[Completion]:
        object_: Kind = "chat.completion.chunk" if self.chat else "text_completion"
        if self.chat:
            opening = Choice(index=0, delta=Said(role="assistant", content=""), finish_reason=None)
            yield Completion(**self._envelope(object_, [opening]))
        async for event in answer.events():
            for text, origins in self._parts(event):
                yield Completion(**self._envelope(object_, [self._choice(text, origins, None, part=True)]))
            if event.finish_reason is not None:
                assert event.stats is not None
                end = self._envelope(object_, [self._choice("", [], event.finish_reason, part=True)])
                stats = self._stats(event.stats)
                if self.asked.usage_in_stream:
                    yield Completion(**end)
                    end = self._envelope(object_, [])
                    yield Completion(**end, usage=Usage.of(event.stats), generation_stats=stats)
                else:
                    yield Completion(**end, generation_stats=stats)

    def _parts(self, event: Event) -> list[tuple[str, list[Origin]]]:
        """What is shown of an event: a chunk for a round that adds text, or one for each token where origins are
        wanted, so that every text stands beside its own."""
        if self.asked.include_origins:
            return [(text, [origin]) for text, origin in zip(event.texts, event.origins, strict=True)]
        text = "".join(event.texts)
        return [(text, [])] if text else []

    def _choice(self, text: str, origins: list[Origin], finish_reason: str | None, *, part: bool) -> Choice:
        said: dict[str, Any]
        if not self.chat:
            said = {"text": text, "logprobs": None}
        elif not part:
            said = {"message": Said(role="assistant", content=text), "logprobs": None}
        else:
            said = {"delta": Said(content=text) if text or not finish_reason else Said()}
        if self.asked.include_origins:
            said["origins"] = origins
        return Choice(index=0, **said, finish_reason=finish_reason)

    def _envelope(self, object_: Kind, choices: list[Choice]) -> dict[str, Any]:
        return {"id": self.id, "object": object_, "created": self.created, "model": self.model, "choices": choices}

    def _stats(self, stats: Stats) -> dict[str, Any]:
        told = stats.as_dict() | {"ignored_fields": self.asked.ignored()}
        if (clamped_to := self.asked.clamped_to) is not None and told["num_draft_tokens_clamped_to"] is None:
            told["num_draft_tokens_clamped_to"] = clamped_to
        return told
