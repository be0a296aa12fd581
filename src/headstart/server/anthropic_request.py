"""Bodies of /v1/messages and /v1/messages/count_tokens, and how they become a request for the engine.

The texts of a message are joined without a separator, and messages keep their order.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..sampling import GrammarSpec
from ..sampling_params import MAX_STOP_CHARACTERS, MAX_STOPS
from .chat import Chat
from .errors import refuse
from .images import EncodedImage, ImagePart, parse_image_url, template_content
from .loaded_model import LoadedModel
from .prepare import Preparation
from .prompt import Prompt, chat_prompt
from .request_fields import (
    REASONING_BUDGETS,
    Arguments,
    BoundedList,
    GenerationRequest,
    JsonObject,
    ModelName,
    RequestModel,
    Text,
    ToolList,
    ToolName,
    reject_media,
)  # fmt: skip

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


class Base64Source(RequestModel):
    type: Literal["base64"]
    media_type: Text
    data: Text


class UrlSource(RequestModel):
    type: Literal["url"]
    url: Text


class ImageBlock(Cacheable, ImagePart):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    def encoded(self) -> EncodedImage:
        if isinstance(self.source, Base64Source):
            return EncodedImage(self.source.data, self.source.media_type.lower())
        return parse_image_url(self.source.url)


class MediaBlock(Cacheable):
    type: Annotated[Literal["document", "video"], AfterValidator(reject_media)]


class SystemMediaBlock(Cacheable):
    type: Annotated[Literal["image", "document", "video"], AfterValidator(reject_media)]


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
    input: Arguments

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "id": self.id, "function": {"name": self.name, "arguments": self.input}}


Texts = Text | BoundedList[Annotated[TextBlock | SystemMediaBlock, Field(discriminator="type")]]
TextsAndImages = Text | BoundedList[Annotated[TextBlock | ImageBlock | MediaBlock, Field(discriminator="type")]]


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextsAndImages | None = None

    def for_template(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": template_content(self.content or "")}


UserContent = Annotated[TextBlock | ImageBlock | MediaBlock | ToolResultBlock, Field(discriminator="type")]
AssistantContent = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Text | BoundedList[UserContent]

    def for_template(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that a template takes: tool results are messages of their own."""
        if isinstance(self.content, str):
            yield {"role": "user", "content": self.content}
            return
        for is_result, blocks in groupby(self.content, lambda block: isinstance(block, ToolResultBlock)):
            if is_result:
                yield from (block.for_template() for block in blocks if isinstance(block, ToolResultBlock))
            else:
                yield {"role": "user", "content": template_content(list(blocks))}


class SystemMessage(RequestModel):
    role: Literal["system"]
    content: Texts

    def for_template(self) -> Iterator[dict[str, Any]]:
        yield {"role": "system", "content": _join(self.content)}


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: Text | BoundedList[AssistantContent]

    def for_template(self) -> Iterator[dict[str, Any]]:
        message: dict[str, Any] = {"role": "assistant", "content": _join(self.content)}
        blocks = [] if isinstance(self.content, str) else self.content
        if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
            message["reasoning_content"] = "".join(thoughts)
        if calls := [block.for_template() for block in blocks if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = calls
        yield message


AnthropicMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class AnthropicTool(Cacheable):
    type: Literal["custom"] | None = Field(None, description="Only tools that the client runs are supported.")
    name: ToolName
    description: Text | None = None
    input_schema: JsonObject

    def for_template(self) -> dict[str, Any]:
        description = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **description, "parameters": self.input_schema}}


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
        if self.messages[-1].role == "assistant":
            refuse("messages", "continuing an assistant message is not supported: end with a user's", "unsupported")
        if self.tool_choice is not None and (self.tool_choice.type == "tool") == (self.tool_choice.name is None):
            refuse("tool_choice.name", "required with the type 'tool', and only with that")

    async def make_prompt(self, served: LoadedModel, work: Preparation) -> Prompt:
        return await chat_prompt(partial(self._chat, served), served, work)

    def _chat(self, served: LoadedModel) -> Chat:
        choice, output = self.tool_choice or ToolChoice(type="auto"), self.output_config or OutputConfig()
        thinking = self.thinking or ThinkingConfig(type="adaptive")
        # Only a model that can think may choose to. Without the field the template's default holds.
        thinks = {"enabled": True, "disabled": False, "adaptive": served.template.markup.thinks or None}
        effort_budget = REASONING_BUDGETS.get(output.effort or "high")
        return Chat(
            self._messages(),
            [tool.for_template() for tool in self.tools or ()],
            tool_choice=TOOL_CHOICES[choice.type],
            tool=choice.name,
            parallel_calls=not choice.disable_parallel_tool_use,
            thinking=thinks[thinking.type] if self.thinking is not None else None,
            thinking_field="thinking",
            budget=effort_budget if thinking.budget_tokens is None else thinking.budget_tokens,
            budget_field="output_config.effort" if thinking.budget_tokens is None else "thinking.budget_tokens",
            grammar=GrammarSpec.json_schema(output.format.schema_, strict=False) if output.format else None,
            grammar_field="output_config.format",
            body=self,
        )

    def _messages(self) -> list[dict[str, Any]]:
        system = "".join(BILLING_LINE.sub("", text) for text in _texts(self.system or ""))
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *(each for message in self.messages for each in message.for_template())]


class MessagesRequest(CountTokensRequest, GenerationRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[BoundedList[StopSequence], Field(max_length=MAX_STOPS)] | None = None
    metadata: dict[str, Any] | None = Field(None, description="Has no effect.")

    def params(self, left: int) -> dict[str, Any]:
        return {"stop": self.stop_sequences or ()}


def _texts(content: str | Iterable[RequestModel]) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [block.text for block in content if isinstance(block, TextBlock)]


def _join(content: str | Iterable[RequestModel]) -> str:
    return "".join(_texts(content))
