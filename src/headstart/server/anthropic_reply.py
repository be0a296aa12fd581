"""What Anthropic's clients are answered: whole, or in events as it comes."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

from ..engine import Event
from .answer import Answer
from .anthropic import MessagesRequest
from .anthropic_message import MessagesAnswer, MessagesUsage, OutputDetails, said
from .anthropic_stream import Blocks, event_of, with_pings
from .drafts import clamped_to
from .errors import to_refusal
from .markup import Delta
from .prompt import Prompt
from .served_model import ServedModel
from .transcript import Piece, Transcript

PING_SECONDS = 5.0  # without anything to say, after which clients are told that all is well


class MessagesReply:
    def __init__(self, asked: MessagesRequest, prompt: Prompt, served: ServedModel):
        self.id = f"msg_{uuid.uuid4().hex}"
        self._asked, self._prompt, self._served = asked, prompt, served
        self._transcript = Transcript(prompt.reader())
        self._stop: str | None = None

    async def whole(self, answer: Answer) -> str:
        deltas: list[Delta] = []
        async for event in answer.events():
            deltas += self._read(event)
        return MessagesAnswer(
            id=self.id,
            model=self._served.id,
            content=said(deltas),
            stop_reason=self._stop_reason(),
            stop_sequence=self._stop,
            usage=self._usage(),
            generation_stats=self._stats(),
        ).model_dump_json()

    async def stream(self, answer: Answer) -> AsyncIterator[str]:
        async for event in with_pings(self._events(answer), PING_SECONDS):
            yield event

    async def _events(self, answer: Answer) -> AsyncIterator[str]:
        try:
            yield event_of("message_start", message=self._opening())
            blocks = Blocks()
            async for event in answer.events():
                for delta in self._read(event):
                    for part in blocks.add(delta):
                        yield part
            for part in blocks.close():
                yield part
            delta_ = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop}
            usage = self._usage().model_dump()
            yield event_of("message_delta", delta=delta_, usage=usage, generation_stats=self._stats())
            yield event_of("message_stop")
        except Exception as error:  # the status has been sent
            yield event_of("error", error=to_refusal(error).messages_body["error"])

    def _opening(self) -> dict[str, Any]:
        """What of the prompt was in the cache is known, and told, at the end."""
        usage = MessagesUsage(input_tokens=len(self._prompt.tokens)).model_dump()
        opening = {"id": self.id, "type": "message", "role": "assistant", "model": self._served.id, "content": []}
        return opening | {"stop_reason": None, "stop_sequence": None, "usage": usage}

    def _read(self, event: Event) -> list[Delta]:
        self._stop = event.stop
        return Piece.of(self._transcript.read(event)).deltas

    def _stop_reason(self) -> str | None:
        reason, stats = self._transcript.finish_reason, self._transcript.stats
        if self._stop is not None:
            return "stop_sequence"
        if reason == "length" and stats is not None and stats.generation_tokens < self._asked.max_tokens:
            return "model_context_window_exceeded"
        return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}.get(reason or "", reason)

    def _usage(self) -> MessagesUsage:
        stats = self._transcript.stats
        assert stats is not None
        return MessagesUsage(
            input_tokens=stats.prompt_tokens - stats.prefix_cache_hit,
            cache_read_input_tokens=stats.prefix_cache_hit,
            output_tokens=stats.generation_tokens,
            output_tokens_details=OutputDetails(thinking_tokens=self._transcript.reasoning_tokens),
        )

    def _stats(self) -> dict[str, Any]:
        stats = self._transcript.stats
        assert stats is not None
        ignored = sorted([*self._asked.ignored(), *self._prompt.ignored])
        clamped = clamped_to(self._asked.num_draft_tokens, stats.clamped_to)
        return stats.as_dict() | {"ignored_fields": ignored, "num_draft_tokens_clamped_to": clamped}
