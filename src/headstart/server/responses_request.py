"""Bodies of /v1/responses, and how they become a request for the engine."""

from base64 import b64decode, b64encode
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from ..engine import Request
from ..sampling import GrammarSpec
from .chat import Chat, Prompt, chat_prompt
from .errors import Refusal
from .openai_request import FunctionCall
from .prepare import Preparation
from .request_fields import (
    REASONING_BUDGETS,
    BoundedList,
    GenerationRequest,
    JsonObject,
    RequestModel,
    Text,
    ToolList,
    ToolName,
    reject_media,
)  # fmt: skip
from .served_model import ServedModel

ENCRYPTED_CONTENT = "reasoning.encrypted_content"  # in `include`: for clients that store responses themselves
SEALED = "headstart:"  # begins reasoning that this server has written as `encrypted_content`
MAX_METADATA = 16

Messages = list[dict[str, Any]]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def seal_reasoning(text: str) -> str:
    """Return reasoning as clients keep it without looking inside. It is encoded and not encrypted: it is theirs."""
    return SEALED + b64encode(text.encode()).decode()


def open_reasoning(sealed: str | None) -> str:
    """Return the reasoning; nothing if another server has sealed it."""
    try:
        return b64decode((sealed or "").removeprefix(SEALED), validate=True).decode() if is_sealed(sealed) else ""
    except ValueError:
        return ""


def is_sealed(text: str | None) -> bool:
    return (text or "").startswith(SEALED)


class ResponsesTextPart(RequestModel):
    type: Annotated[
        Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"], BeforeValidator(reject_media)
    ]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Text | BoundedList[ResponsesTextPart]


class Item(RequestModel):
    """A part of the conversation."""

    type: str
    id: Text | None = None
    status: Text | None = None

    def add_to(self, messages: Messages) -> None:
        """Add the item to the messages that a template takes."""
        raise NotImplementedError


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: Text | None = None

    def add_to(self, messages: Messages) -> None:
        if self.role == "assistant":
            _assistant(messages)["content"] += _text(self.content)
        else:
            messages.append({"role": "user" if self.role == "user" else "system", "content": _text(self.content)})


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: BoundedList[ResponsesTextPart] | None = None
    content: BoundedList[ResponsesTextPart] | None = None
    encrypted_content: Text | None = None

    def add_to(self, messages: Messages) -> None:
        text = _text(self.content or []) or open_reasoning(self.encrypted_content) or _text(self.summary or [])
        if not text:
            return
        last = messages[-1] if messages else {}
        message = _assistant(messages, new=bool(last.get("content") or last.get("tool_calls")))
        message["reasoning_content"] = message.get("reasoning_content", "") + text


class FunctionCallItem(Item, FunctionCall):
    type: Literal["function_call"]
    call_id: Text

    def add_to(self, messages: Messages) -> None:
        function = {"name": self.name, "arguments": self.arguments}
        call = {"type": "function", "id": self.call_id, "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)


class FunctionCallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: Text
    output: Parts

    def add_to(self, messages: Messages) -> None:
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)})


ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")


def _item_type(item: Any) -> Any:
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    return item.get("type", "message" if "role" in item else None)


def _reject_unknown(item: Any) -> Any:
    if (kind := _item_type(item)) not in ITEM_TYPES:
        raise PydanticCustomError(
            "unsupported",
            "items of the type {kind} are not supported by this server: send {known}",
            {"kind": repr(kind)[:100], "known": ", ".join(ITEM_TYPES)},
        )
    return item


def _reject_built_in(kind: object) -> object:
    if kind != "function":
        raise PydanticCustomError(
            "unsupported",
            "tools of the type {kind} are not supported by this server: send functions",
            {"kind": repr(kind)[:100]},
        )
    return kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")],
    Discriminator(_item_type),
    BeforeValidator(_reject_unknown),
]
ITEMS = TypeAdapter(list[InputItem])
FunctionType = Annotated[Literal["function"], BeforeValidator(_reject_built_in)]


class ResponsesTool(RequestModel):
    type: FunctionType
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, Any]:
        known = {"name", "description", "parameters"}
        return {"type": "function", "function": self.model_dump(include=known, exclude_none=True)}


class NamedTool(RequestModel):
    type: FunctionType
    name: Text


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    def grammar(self) -> GrammarSpec | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return GrammarSpec("json_object")
        if self.schema_ is None:
            raise Refusal(400, "text.format: has no schema: send one", param="text.format", code="invalid_value")
        return GrammarSpec.json_schema(self.schema_)


class TextConfig(RequestModel):
    format: TextFormat | None = None


class ReasoningConfig(RequestModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(GenerationRequest):
    input: Text | BoundedList[InputItem]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    max_output_tokens: int | None = None
    store: bool | None = Field(None, description="False: do not keep the response for later requests.")
    metadata: Annotated[dict[Text, Text], Field(max_length=MAX_METADATA)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: leave out the oldest turns of a conversation that is too long."
    )
    tools: ToolList[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: one call, where one is required.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: BoundedList[Text] | None = None

    unsupported: ClassVar[tuple[str, ...]] = (
        "background", "conversation", "context_management", "prompt", "top_logprobs",
    )  # fmt: skip

    @property
    def items(self) -> list[Item]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else list(self.input)

    def engine_request(self, prompt: Prompt, context: int) -> Request:
        most = context - len(prompt.tokens) if self.max_output_tokens is None else self.max_output_tokens
        return Request(prompt.tokens, self.sampling_params(prompt, max_tokens=most))

    async def make_prompt(self, served: ServedModel, work: Preparation) -> Prompt:
        messages = self._messages()
        if self.truncation != "auto":
            return await chat_prompt(partial(self._chat, messages), served, work)
        context = served.model.context_length
        most = context - min(self.max_output_tokens or context // 8, context // 2)  # leaves room for an answer
        turns = [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]
        first = [message for message in messages[: turns[0]] if message["role"] == "system"]

        async def prompt_of(dropped: int, *, last: bool = False) -> Prompt | None:
            """Return the prompt without the first `dropped` turns, if it fits or is the `last` one to try."""
            kept = [*first, *messages[turns[dropped] :]] if dropped else messages
            try:
                prompt = await chat_prompt(partial(self._chat, kept), served, work)
            except Refusal as refused:
                if refused.code != "context_length_exceeded" or last:
                    raise
                return None
            return prompt if last or len(prompt.tokens) <= most else None

        prompt, fewest, enough = await prompt_of(0), 1, len(turns) - 1
        if prompt is not None:
            return prompt
        while fewest < enough:
            middle = (fewest + enough) // 2
            fewest, enough = (fewest, middle) if await prompt_of(middle) else (middle + 1, enough)
        prompt = await prompt_of(enough, last=True)
        assert prompt is not None
        return prompt

    def _chat(self, messages: Messages) -> Chat:
        choice, reasoning = self.tool_choice or "auto", self.reasoning or ReasoningConfig()
        effort = reasoning.effort
        return Chat(
            messages,
            [tool.for_template() for tool in self.tools or ()],
            tool_choice=choice if isinstance(choice, str) else "auto",
            tool=choice.name if isinstance(choice, NamedTool) else None,
            parallel_calls=self.parallel_tool_calls is not False,
            thinking=None if effort is None else effort != "none",
            thinking_field="reasoning.effort",
            budget=REASONING_BUDGETS.get(effort or "high"),
            budget_field="reasoning.effort",
            template_options={"reasoning_effort": effort} if effort else {},
            grammar=self.text.format.grammar() if self.text and self.text.format else None,
            grammar_field="text.format",
            param="input",
        )

    def _messages(self) -> Messages:
        messages: Messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        for item in self.items:
            item.add_to(messages)
        return messages


def _assistant(messages: Messages, *, new: bool = False) -> dict[str, Any]:
    """Return the assistant's message at the end: the items of a turn are one message to templates."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(parts: str | list[ResponsesTextPart]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)
