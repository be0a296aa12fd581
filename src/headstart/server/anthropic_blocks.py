"""The messages of Anthropic's conversations, which are made of blocks, and what chat templates know them as.

Texts are put together as they are, without anything between them, and messages stay in their order.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from .errors import refuse
from .shape import Json, Listed, Shape, Text


class Cached(Shape):
    """All prompts are cached, so a mark of where to is welcome and changes nothing."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Cached):
    type: Literal["text"]
    text: Text


class Thinking(Shape):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinking(Shape):
    """Thoughts of another model, which only its makers can read."""

    type: Literal["redacted_thinking"]
    data: Text | None = None


class ToolUse(Cached):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Json


class Media(Cached):
    type: Literal["image", "document"]


class ToolResult(Cached):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Listed[Annotated[TextBlock | Media, Field(discriminator="type")]] | None = None


Block = Annotated[
    TextBlock | Thinking | RedactedThinking | ToolUse | ToolResult | Media,
    Field(discriminator="type"),
]
SAID_BY: dict[str, tuple[type[Shape], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResult),
    "assistant": (TextBlock, Thinking, RedactedThinking, ToolUse),
}


class Message(Shape):
    role: Literal["user", "assistant", "system"]
    content: Text | Listed[Block]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def check(self, place: str) -> None:
        for i, block in enumerate(self.blocks):
            here = f"{place}.content[{i}]"
            inner = block.content if isinstance(block, ToolResult) and isinstance(block.content, list) else []
            for each in (block, *inner):
                if isinstance(each, Media):
                    refuse(here, f"{each.type}: this server reads text only: leave it out", "unsupported")
            if not isinstance(block, SAID_BY[self.role]):
                refuse(here, f"{block.type}: no such block in a message of the {self.role}'s")

    def for_template(self) -> Iterator[dict[str, Any]]:
        """Templates know the results of tools as messages of their own."""
        if self.role != "user":
            yield self._said()
            return
        for is_result, blocks in groupby(self.blocks, lambda block: isinstance(block, ToolResult)):
            if is_result:
                yield from (_result(block) for block in blocks if isinstance(block, ToolResult))
            else:
                yield {"role": "user", "content": text_of(blocks)}

    def _said(self) -> dict[str, Any]:
        said: dict[str, Any] = {"role": self.role, "content": text_of(self.blocks)}
        if thoughts := [block.thinking for block in self.blocks if isinstance(block, Thinking)]:
            said["reasoning_content"] = "".join(thoughts)
        if calls := [block for block in self.blocks if isinstance(block, ToolUse)]:
            said["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        return said


def _result(block: ToolResult) -> dict[str, Any]:
    content = block.content or ""
    text = content if isinstance(content, str) else text_of(content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def text_of(blocks: Iterable[Shape]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
