"""What a message of the assistant's is made of."""

import uuid
from hashlib import sha256
from typing import Any, Literal

from pydantic import BaseModel

from .markup import Content, Delta, Reasoning, ToolArguments, ToolBroken, ToolCall, loads, merged


class TokenCount(BaseModel):
    input_tokens: int


class OutputDetails(BaseModel):
    thinking_tokens: int


class MessagesUsage(BaseModel):
    """The prompt has input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails(thinking_tokens=0)


class SaidText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class SaidThinking(BaseModel):
    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class SaidToolUse(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Said = SaidText | SaidThinking | SaidToolUse


class MessagesAnswer(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Said]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    generation_stats: dict[str, Any]


def said(deltas: list[Delta]) -> list[Said]:
    """The blocks of a whole message, which has no broken calls, only their text."""
    broken = {delta.index for delta in deltas if isinstance(delta, ToolBroken)}
    names: dict[int, str] = {}
    blocks: list[Said] = []
    for delta in merged(delta for delta in deltas if getattr(delta, "index", None) not in broken):
        match delta:
            case Content(text):
                blocks.append(SaidText(text=text))
            case Reasoning(text):
                blocks.append(SaidThinking(thinking=text, signature=signature(text)))
            case ToolCall(index, name):
                names[index] = name
            case ToolArguments(index, fragment):
                blocks.append(SaidToolUse(id=call_id(), name=names[index], input=loads(fragment)))
    return blocks


def signature(thought: str) -> str:
    """Nobody checks it here, but clients keep only thoughts that have one. The same thought has the same."""
    return sha256(thought.encode()).hexdigest()


def call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"
