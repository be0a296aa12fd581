"""Bodies of /v1/messages and /v1/messages/count_tokens, and how they become a request for the engine.

The texts of a message are joined without a separator, and messages keep their order.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..engine import Request
from ..sampling import GrammarSpec
from ..sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS
from .chat import Chat
from .errors import refuse
from .prepare import Preparation
from .prompt import Prompt, chat_prompt
from .request_fields import (
    REASONING_BUDGETS,
    BoundedList,
    GenerationRequest,
    JsonObject,
    ModelName,
    RequestModel,
    Text,
    ToolList,
    ToolName,
    reject_media,
)
from .served_model import ServedModel

# Claude Code starts its system prompt with a line for Anthropic's billing that differs in every request, so that no
# prompt would be found in the prefix cache. It means nothing to a model and is left out.
BILLING_LINE = re.compile(r"\Ax-anthropic-billing[^\n]*\n?")
TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "auto", "none": "none"}

StopSequence = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class Cacheable(RequestModel):
    """All prompts are cached, so a mark for caching is accepted and changes nothing."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Cacheable):
    type: Literal["text"]
    text: Text


class MediaBlock(Cacheable):
    type: Annotated[Literal["image", "document"], AfterValidator(reject_media)]


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(RequestModel):
    """Reasoning of another model, which only Anthropic can read."""

    type: Literal["redacted_thinking"]
    data: Text | None = None


class ToolUseBlock(Cacheable):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: JsonObject


TextOrMedia = Annotated[TextBlock | MediaBlock, Field(discriminator="type")]
Texts = Text | BoundedList[TextOrMedia]


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts | None = None

    def for_template(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": _join(self.content or "")}


ContentBlock = Annotated[
    TextBlock | MediaBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
BLOCKS_BY_ROLE: dict[str, tuple[type[RequestModel], ...]] = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
}


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Text | BoundedList[ContentBlock]

    @property
    def blocks(self) -> list[ContentBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    def check(self, place: str) -> None:
        for i, block in enumerate(self.blocks):
            if not isinstance(block, BLOCKS_BY_ROLE[self.role]):
                refuse(f"{place}.content[{i}]", f"{block.type}: not allowed in a message with the role {self.role}")

    def for_template(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that a template takes: tool results are messages of their own."""
        if self.role != "user":
            message = {"role": self.role, "content": _join(self.blocks)}
            if thoughts := [block.thinking for block in self.blocks if isinstance(block, ThinkingBlock)]:
                message["reasoning_content"] = "".join(thoughts)
            calls = [
                {"type": "function", "id": block.id, "function": {"name": block.name, "arguments": block.input}}
                for block in self.blocks
                if isinstance(block, ToolUseBlock)
            ]
            yield {**message, "tool_calls": calls} if calls else message
            return
        for is_text, blocks in groupby(self.blocks, lambda block: isinstance(block, TextBlock)):
            if is_text:
                yield {"role": "user", "content": _join(blocks)}
            else:
                yield from (block.for_template() for block in blocks if isinstance(block, ToolResultBlock))


class AnthropicTool(Cacheable):
    type: Text | None = None
    name: ToolName
    description: Text | None = None
    input_schema: JsonObject | None = Field(None, description="Required, except for tools that run at Anthropic.")

    def check(self, place: str) -> None:
        if self.type not in (None, "custom"):
            refuse(place, f"{self.type}: only tools that the client runs are supported: leave it out", "unsupported")
        if self.input_schema is None:
            refuse(f"{place}.input_schema", "Field required")

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(default=None, description="The tool that must be called.")
    disable_parallel_tool_use: bool | None = Field(default=None, description="One call, where one is required.")


class ThinkingConfig(RequestModel):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: JsonObject | bool = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Cacheable):
    """A prompt, to be counted or answered."""

    model: ModelName = None
    messages: BoundedList[AnthropicMessage] = Field(min_length=1)
    system: Texts | None = None
    tools: ToolList[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def check(self) -> None:
        for i, message in enumerate(self.messages):
            message.check(f"messages[{i}]")
        if self.messages[-1].role == "assistant":
            refuse("messages", "continuing an assistant message is not supported: end with a user's", "unsupported")
        for i, tool in enumerate(self.tools or ()):
            tool.check(f"tools[{i}]")
        if self.tool_choice is not None and (self.tool_choice.type == "tool") == (self.tool_choice.name is None):
            refuse("tool_choice.name", "required with the type 'tool', and only with that")

    async def make_prompt(self, served: ServedModel, work: Preparation) -> Prompt:
        return await chat_prompt(partial(self._chat, served), served, work)

    def _chat(self, served: ServedModel) -> Chat:
        choice, output = self.tool_choice or ToolChoice(type="auto"), self.output_config or OutputConfig()
        thinking = self.thinking or ThinkingConfig(type="adaptive")
        # Only a model that can think may choose to. Without the field the template's default holds.
        thinks = {"enabled": True, "disabled": False, "adaptive": served.template.markup.thinks or None}
        effort_budget = REASONING_BUDGETS.get(output.effort or "high")
        return Chat(
            self._messages(),
            [tool.for_template() for tool in self.tools or ()],
            schema_field="input_schema",
            tool_choice=TOOL_CHOICES[choice.type],
            tool=choice.name,
            parallel_calls=not choice.disable_parallel_tool_use,
            thinking=thinks[thinking.type] if self.thinking is not None else None,
            thinking_field="thinking",
            budget=effort_budget if thinking.budget_tokens is None else thinking.budget_tokens,
            budget_field="output_config.effort" if thinking.budget_tokens is None else "thinking.budget_tokens",
            grammar=GrammarSpec.json_schema(output.format.schema_) if output.format else None,
            grammar_field="output_config.format",
        )

    def ignored_fields(self) -> list[str]:
        found = set(self.unknown_fields())
        if any(BILLING_LINE.match(text) for text in _texts(self.system or "")):
            found.add("system: x-anthropic-billing")
        if any(block.type == "redacted_thinking" for message in self.messages for block in message.blocks):
            found.add("messages[].content[]: redacted_thinking")
        choice, output = self.tool_choice, self.output_config
        unconstrained = choice is not None and choice.type == "auto" and (output is None or output.format is None)
        if choice is not None and choice.disable_parallel_tool_use and unconstrained:
            found.add("tool_choice.disable_parallel_tool_use")  # nothing prevents several calls
        return sorted(found)

    def _messages(self) -> list[dict[str, Any]]:
        system = "".join(BILLING_LINE.sub("", text) for text in _texts(self.system or ""))
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *(each for message in self.messages for each in message.for_template())]


class MessagesRequest(CountTokensRequest, GenerationRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[BoundedList[StopSequence], Field(max_length=MAX_STOPS)] | None = None
    metadata: dict[str, Any] | None = Field(None, description="Has no effect.")

    def engine_request(self, prompt: Prompt, context: int) -> Request:
        return Request(prompt.tokens, self.sampling_params(prompt, stop=self.stop_sequences or ()))


def _texts(content: str | Iterable[RequestModel]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [block.text for block in content if isinstance(block, TextBlock)]


def _join(content: str | Iterable[RequestModel]) -> str:
    return "".join(_texts(content))
