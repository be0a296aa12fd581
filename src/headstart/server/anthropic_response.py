"""Responses of /v1/messages, whole or as a stream of events."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from ..engine import Event
from .anthropic_request import MessagesRequest
from .markup import CALL, Delta, loads, merge
from .response import Events, ResponseWriter, TokenSpan, encode_json, new_id

SIGNATURE = "headstart"  # of reasoning: nobody checks it, but clients keep only reasoning that has one
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Json = dict[str, Any]


class AnthropicWriter(ResponseWriter[MessagesRequest]):
    def __post_init__(self) -> None:
        self._begin("msg_")
        (self._output,) = self.outputs
        self._stop: str | None = None  # the stop sequence that ended it

    async def complete(self, events: Events) -> str:
        deltas: list[Delta] = []
        async for event in events:
            deltas += self._read(event)
        message = self._message(_content_blocks(deltas), **self._end(), usage=self._usage())
        return encode_json(message | {"generation_stats": self.generation_stats(self._output.stats)})

    async def stream(self, events: Events) -> AsyncIterator[str]:
        usage = {**self._usage(), "input_tokens": len(self.prompt.tokens)}  # how much was cached is not known yet
        yield _event("message_start", message=self._message([], stop_reason=None, stop_sequence=None, usage=usage))
        blocks = BlockStream()
        async for event in events:
            for delta in self._read(event):
                for part in blocks.add(delta):
                    yield part
        for part in blocks.close():
            yield part
        stats = self.generation_stats(self._output.stats)
        yield _event("message_delta", delta=self._end(), usage=self._usage(), generation_stats=stats)
        yield _event("message_stop")

    def sign(self, done: int, total: int) -> str:
        return _event("ping")

    def _message(self, content: list[Json], **fields: Any) -> Json:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model_id}
        return {**message, "content": content, **fields}

    def _read(self, event: Event) -> list[Delta]:
        self._stop = event.stop
        return TokenSpan.join(self._output.read(event)).deltas

    def _end(self) -> Json:
        reason = self._output.finish_reason
        stop_reason = STOP_REASONS.get(reason or "", reason)
        if self._stop is not None:
            stop_reason = "stop_sequence"
        elif reason == "length" and self._output.stats.generation_tokens < self.body.max_tokens:
            stop_reason = "model_context_window_exceeded"
        return {"stop_reason": stop_reason, "stop_sequence": self._stop}

    def _usage(self) -> Json:
        """Return the tokens so far. Those of the prompt are input_tokens and cache_read_input_tokens together."""
        stats = self._output.stats
        return {
            "input_tokens": stats.prompt_tokens - stats.prefix_cache_hit,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stats.prefix_cache_hit,
            "output_tokens": stats.generation_tokens,
            "output_tokens_details": {"thinking_tokens": self._output.reasoning_tokens},
        }


def _content_blocks(deltas: list[Delta]) -> list[Json]:
    """Return the content of a whole message."""
    blocks: list[Json] = []
    for part in merge(deltas):
        if part.kind != "arguments":
            blocks.append(_block(part, part.text))
            continue
        try:
            blocks[-1]["input"] = loads(part.text)
        except ValueError:  # cut off or malformed: no client may run it
            text = f'{CALL}\n{{"name": "{blocks[-1]["name"]}", "arguments": {part.text}'
            blocks[-1] = {"type": "text", "text": text}
    return blocks


def _block(delta: Delta, text: str) -> Json:
    match delta.kind:
        case "content":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE if text else ""}
    return {"type": "tool_use", "id": new_id("toolu_"), "name": delta.text, "input": {}}


class BlockStream:
    """The events of the content blocks of a message, one block after another."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None  # the type of the open block

    def add(self, delta: Delta) -> Iterator[str]:
        match delta.kind:
            case "arguments":
                yield self._delta("input_json_delta", partial_json=delta.text)
            case kind:
                block = _block(delta, "")
                if self._open != block["type"] or kind == "tool_call":
                    yield from self.close()
                    self._open = block["type"]
                    self._index += 1
                    yield _event("content_block_start", index=self._index, content_block=block)
                if kind == "content":
                    yield self._delta("text_delta", text=delta.text)
                elif kind == "reasoning":
                    yield self._delta("thinking_delta", thinking=delta.text)

    def close(self) -> Iterator[str]:
        """End the open block."""
        if self._open == "thinking":
            yield self._delta("signature_delta", signature=SIGNATURE)
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _delta(self, kind: str, **fields: str) -> str:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(type: str, **fields: Any) -> str:
    return f"event: {type}\ndata: {encode_json({'type': type, **fields})}\n\n"
