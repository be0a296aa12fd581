"""Bodies of /v1/responses, and how they become a request for the engine."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ..sampling import GrammarSpec
from .chat import Chat
from .errors import Refusal
from .loaded_model import LoadedModel
from .openai_request import JsonSchemaFormat
from .prepare import Preparation
from .prompt import Prompt, chat_prompt
from .request_fields import (
    NO_EFFECT,
    REASONING_BUDGETS,
    BoundedList,
    Effort,
    JsonObject,
    Penalty,
    ProgressRequest,
    RequestModel,
    Text,
    TokenLimit,
    ToolList,
    ToolName,
)  # fmt: skip
from .responses_items import InputItem, Item, MessageItem, Messages, full_name, to_messages
from .shorter import starts_of_shorter

ENCRYPTED_CONTENT = "reasoning.encrypted_content"  # in `include`: for clients that store responses themselves
MAX_METADATA = 16


def _reject_built_in(kind: object) -> object:
    if kind not in ("function", "namespace"):
        raise PydanticCustomError(
            "unsupported",
            "tools of the type {kind} are not supported by this server: send functions",
            {"kind": repr(kind)[:100]},
        )
    return kind


def _reject_built_in_tool(tool: Any) -> Any:
    if isinstance(tool, dict):
        _reject_built_in(tool.get("type"))
    return tool


FunctionType = Annotated[Literal["function"], BeforeValidator(_reject_built_in)]


class ResponsesFunction(RequestModel):
    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def for_template(self, namespace: str | None = None) -> dict[str, Any]:
        function = self.model_dump(include={"description", "parameters"}, exclude_none=True)
        return {"type": "function", "function": {"name": full_name(self.name, namespace), **function}}


class Namespace(RequestModel):
    """Functions under a common name, which Codex groups its tools by."""

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: ToolList[Annotated[ResponsesFunction, BeforeValidator(_reject_built_in_tool)]]


ResponsesTool = Annotated[
    ResponsesFunction | Namespace, Field(discriminator="type"), BeforeValidator(_reject_built_in_tool)
]


class NamedTool(RequestModel):
    type: FunctionType
    name: Text
    namespace: Text | None = None


class TextFormat(JsonSchemaFormat):
    type: Literal["text", "json_object", "json_schema"]

    def grammar(self) -> GrammarSpec | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return GrammarSpec("json_object")
        if self.schema_ is None:
            raise Refusal(400, "text.format: has no schema: send one", param="text.format", code="invalid_value")
        return GrammarSpec.json_schema(self.schema_, strict=bool(self.strict))


class TextConfig(RequestModel):
    format: TextFormat | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the format as the response says it."""
        if self.format is None or self.format.type != "json_schema":
            return {"type": self.format.type if self.format is not None else "text"}
        defaults = {"name": "response", "description": None, "strict": False}
        return defaults | self.format.model_dump(by_alias=True, exclude_none=True)


ResponsesInput = Text | BoundedList[InputItem]


class ReasoningConfig(RequestModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(ProgressRequest):
    input: ResponsesInput
    instructions: Text | None = None
    previous_response_id: Text | None = None
    max_output_tokens: TokenLimit | None = None
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
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Without effect here: every prompt is cached, there is one tier, and the only tools are the client's.
    max_tool_calls: int | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    service_tier: Text | None = None
    generate: bool | None = Field(None, description="False: read the prompt, and answer nothing.")

    unsupported = dict.fromkeys(
        ("background", "conversation", "context_management", "prompt", "top_logprobs"), NO_EFFECT
    )

    @property
    def items(self) -> list[Item]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else list(self.input)

    @property
    def functions(self) -> list[tuple[str | None, ResponsesFunction]]:
        """Return the functions that may be called, each with its namespace."""
        functions: list[tuple[str | None, ResponsesFunction]] = []
        for tool in self.tools or ():
            if isinstance(tool, Namespace):
                functions += [(tool.name, each) for each in tool.tools]
            else:
                functions.append((None, tool))
        return functions

    def call_name(self, called: str) -> dict[str, str]:
        """Return the fields that name a function in a call. `called`: the name that the model knows it by."""
        for namespace, function in self.functions:
            if namespace is not None and full_name(function.name, namespace) == called:
                return {"name": function.name, "namespace": namespace}
        return {"name": called}

    def params(self, left: int) -> dict[str, Any]:
        if self.generate is False:
            return {"max_tokens": 1}
        return {"max_tokens": left if self.max_output_tokens is None else self.max_output_tokens}

    async def make_prompt(self, served: LoadedModel, work: Preparation) -> Prompt:
        messages = await work.run(self._messages)
        if self.truncation != "auto":
            return await chat_prompt(partial(self._chat, messages), served, work)
        context = served.model.context_length
        most = context - min(self.max_output_tokens or context // 8, context // 2)  # leaves room for an answer

        turns = (i for i, message in enumerate(messages) if message["role"] == "user")
        first = [message for message in messages[: next(turns, 0)] if message["role"] == "system"]

        async def prompt_of(start: int, *, last: bool = False) -> Prompt | None:
            """Return the prompt from the message `start` on, if it fits or is the `last` one to try."""
            kept = [*first, *messages[start:]] if start else messages
            try:
                prompt = await chat_prompt(partial(self._chat, kept), served, work)
            except Refusal as refused:
                if refused.code != "context_length_exceeded" or last:
                    raise
                return None
            return prompt if last or len(prompt.tokens) <= most else None

        if (prompt := await prompt_of(0)) is not None:
            return prompt
        starts = await work.run(starts_of_shorter, messages, context, work.preparer.encoder)
        fewest, enough = 0, len(starts) - 1
        while fewest < enough:
            middle = (fewest + enough) // 2
            fewest, enough = (fewest, middle) if await prompt_of(starts[middle]) else (middle + 1, enough)
        prompt = await prompt_of(starts[enough], last=True)
        assert prompt is not None
        return prompt

    def _chat(self, messages: Messages) -> Chat:
        choice, reasoning = self.tool_choice or "auto", self.reasoning or ReasoningConfig()
        effort = reasoning.effort
        return Chat(
            messages,
            [function.for_template(namespace) for namespace, function in self.functions],
            tool_choice=choice if isinstance(choice, str) else "auto",
            tool=full_name(choice.name, choice.namespace) if isinstance(choice, NamedTool) else None,
            parallel_calls=self.parallel_tool_calls is not False,
            thinking=None if effort is None else effort != "none",
            thinking_field="reasoning.effort",
            budget=REASONING_BUDGETS.get(effort or "high"),
            budget_field="reasoning.effort",
            template_options={"reasoning_effort": effort} if effort else {},
            grammar=self.text.format.grammar() if self.text and self.text.format else None,
            grammar_field="text.format",
            param="input",
            body=self,
        )

    def _messages(self) -> Messages:
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*instructions, *to_messages(self.items)]
