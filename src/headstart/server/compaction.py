"""Compaction of a conversation (/v1/responses/compact): a summary takes the place of what was said.

The model writes the summary. System messages stay, and the latest of the user's, which are what it was asked to do.
"""

import asyncio
import time
from typing import Any

from .errors import refuse
from .request_fields import RequestModel, Text
from .response import Events, encode_json, new_id
from .responses_items import MessageItem, seal
from .responses_request import ReasoningConfig, ResponsesInput, ResponsesRequest
from .responses_response import ResponsesWriter

ASK = (
    "Write a summary of this conversation for whoever continues it without having read it: what was asked and "
    "decided, what was done and found, the names, paths and values that are still needed, and what comes next. "
    "Write nothing else."
)
MOST_TOKENS = 4096  # of a summary


class CompactRequest(RequestModel):
    model: Text
    input: ResponsesInput | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    prompt_cache_key: Text | None = None

    def conversation(self) -> ResponsesRequest:
        """Return a request that holds the conversation, or what is added to the one that it continues."""
        fields = self.model_dump(include={"model", "instructions", "previous_response_id"})
        begun = ResponsesRequest(**fields, input=[], store=False)
        return begun.model_copy(update={"input": self.input or []})  # as it is: it was validated with the body


def ask_for_summary(conversation: ResponsesRequest) -> ResponsesRequest:
    asked = {
        "input": [*conversation.items, MessageItem(role="user", content=ASK)],
        "truncation": "auto",
        "max_output_tokens": MOST_TOKENS,
        "reasoning": ReasoningConfig(effort="none"),
    }
    return conversation.model_copy(update=asked)


class CompactionWriter(ResponsesWriter):
    """Writes the items that a client continues from. `body`: of `ask_for_summary`."""

    async def complete(self, events: Events) -> str:
        async for _ in self._events(events):
            pass
        messages = [item for item in self._items.items if item["type"] == "message"]
        if not (summary := "".join(message["content"][0]["text"] for message in messages).strip()):
            refuse("input", "the model wrote no summary: continue with the conversation as it is", "no_summary")
        return await asyncio.to_thread(self._compacted, summary)  # of what the client sent, which may be long

    def _compacted(self, summary: str) -> str:
        compaction = {"type": "compaction", "id": new_id("cmp_"), "encrypted_content": seal(summary)}
        compacted = {
            "id": self.id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*self._kept(), compaction],
            "usage": self._usage(),
            "generation_stats": self.generation_stats(self._output.stats),
        }
        return encode_json(compacted)

    def _kept(self) -> list[dict[str, Any]]:
        """Return system messages, and as many of the user's as are about a quarter of the context."""
        kept, left = [], self.served.model.context_length  # characters: a token has about four
        for item in reversed(self.body.items[:-1]):
            if not isinstance(item, MessageItem) or item.role == "assistant":
                continue
            message = item.to_json()
            if isinstance(item.content, str):
                message["content"] = [{"type": "input_text", "text": item.content}]
            left -= len(encode_json(message)) if item.role == "user" else 0
            if left >= 0 or item.role != "user":
                kept.append({"id": new_id("msg_"), "status": "completed", **message})
        return kept[::-1]
