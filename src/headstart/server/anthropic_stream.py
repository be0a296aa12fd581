"""Server-sent events of a message: its blocks one after another, and signs of life while there is nothing to say."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

from .anthropic_message import Said, SaidText, SaidThinking, SaidToolUse, call_id, signature
from .markup import Content, Delta, Reasoning, ToolArguments, ToolBroken, ToolCall


def event_of(kind: str, **what: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **what})}\n\n"


class Blocks:
    """The blocks of a message in a stream, one after another."""

    def __init__(self) -> None:
        self._index = -1
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._thought = ""

    def add(self, delta: Delta) -> Iterator[str]:
        match delta:
            case Content(text):
                yield from self._enter(SaidText(text=""))
                yield self._add("text_delta", text=text)
            case Reasoning(text):
                yield from self._enter(SaidThinking(thinking="", signature=""))
                self._thought += text
                yield self._add("thinking_delta", thinking=text)
            case ToolCall(_, name):
                yield from self.close()
                yield from self._enter(SaidToolUse(id=call_id(), name=name, input={}))
            case ToolArguments(_, fragment):
                yield self._add("input_json_delta", partial_json=fragment)
            case ToolBroken():  # it cannot be taken back: its text follows
                yield from self.close()

    def close(self) -> Iterator[str]:
        if self._open == "thinking":
            yield self._add("signature_delta", signature=signature(self._thought))
        if self._open is not None:
            yield event_of("content_block_stop", index=self._index)
        self._open, self._thought = None, ""

    def _enter(self, block: Said) -> Iterator[str]:
        """Into a block of this kind, where there is none."""
        if self._open == block.type:
            return
        yield from self.close()
        self._open = block.type
        self._index += 1
        yield event_of("content_block_start", index=self._index, content_block=block.model_dump())

    def _add(self, kind: str, **what: str) -> str:
        return event_of("content_block_delta", index=self._index, delta={"type": kind, **what})


async def with_pings(events: AsyncIterator[str], seconds: float) -> AsyncIterator[str]:
    """The events, and a ping whenever none has come for so long: while the prompt is read, or waits its turn."""
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait([coming], timeout=seconds)
            if not coming.done():
                yield event_of("ping")
                continue
            if (event := coming.result()) is None:
                return
            yield event
            coming = asyncio.ensure_future(anext(events, None))
    finally:
        coming.cancel()
