"""Bodies of /v1/chat/completions and /v1/completions, and how they become a request for the engine."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field

from ..sampling import GrammarSpec
from ..sampling_params import MAX_BIASES, MAX_TOP_LOGPROBS
from .chat import Chat
from .errors import refuse
from .images import EncodedImage, ImagePart, parse_image_url, template_content
from .loaded_model import LoadedModel
from .prepare import Preparation
from .prompt import Prompt, TextPrompt, chat_prompt, text_prompt
from .request_fields import (
    NO_EFFECT,
    REASONING_BUDGETS,
    Arguments,
    BoundedList,
    Effort,
    JsonObject,
    Penalty,
    ProgressRequest,
    RequestModel,
    Stops,
    Text,
    TokenLimit,
    ToolList,
    ToolName,
    as_tuple,
    reject_media_part,
)  # fmt: skip

UNSUPPORTED = {"best_of": (*NO_EFFECT, 1)} | dict.fromkeys(
    ("echo", "suffix", "functions", "function_call", "modalities", "prompt_logprobs"), NO_EFFECT
)
CHAT_ONLY = (
    "tools", "tool_choice", "enable_thinking", "reasoning_effort", "thinking_budget", "chat_template_kwargs",
    "top_logprobs",
)  # fmt: skip
MAX_CHOICES = 16
NO_LIMIT = -1  # of max_tokens, as LM Studio and llama.cpp have it
MAX_ANSWERS = 128  # to a list of prompts
MAX_CLIENT_BIASES = MAX_BIASES - 1  # a chat that may not call tools adds one
TokenIds = Annotated[list[int], Field(fail_fast=True)]
TokenId = Annotated[int, Field(strict=False)]  # names in JSON are strings


class TextPart(RequestModel):
    type: Literal["text"]
    text: Text


class ImageUrl(RequestModel):
    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImageUrlPart(RequestModel, ImagePart):
    type: Literal["image_url"]
    image_url: ImageUrl

    def encoded(self) -> EncodedImage:
        return parse_image_url(self.image_url.url, low=self.image_url.detail == "low")


ContentPart = Annotated[TextPart | ImageUrlPart, Field(discriminator="type"), BeforeValidator(reject_media_part)]


class FunctionCall(RequestModel):
    name: Text
    arguments: Arguments = Field({}, description="The text of a JSON object, or the object.")


class OpenAIToolCall(RequestModel):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"type": "function", "id": self.id, "function": function}


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | BoundedList[ContentPart] | None = None
    reasoning_content: Text | None = Field(None, description="The assistant's reasoning; also as `reasoning`.")
    reasoning: Text | None = None
    tool_calls: BoundedList[OpenAIToolCall] | None = None
    tool_call_id: Text | None = None

    def for_template(self) -> dict[str, Any]:
        content = template_content(self.content or "")
        if not isinstance(content, str) and self.role not in ("user", "tool"):
            refuse("messages", f"a message of the role {self.role} has an image: send it as the user's")
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class OpenAIFunction(RequestModel):
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None


class OpenAITool(RequestModel):
    type: Literal["function"]
    function: OpenAIFunction

    def for_template(self) -> dict[str, Any]:
        known = set(OpenAIFunction.model_fields)
        return {"type": "function", "function": self.function.model_dump(include=known, exclude_none=True)}


class StreamOptions(RequestModel):
    include_usage: bool | None = None


class JsonSchemaFormat(RequestModel):
    name: Text | None = None
    description: Text | None = None
    schema_: JsonObject | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonObject | bool | None = Field(None, alias="schema", description="llama.cpp's, of a json_object.")

    def grammar(self) -> GrammarSpec | None:
        if self.type == "json_object" and self.schema_ is not None:
            return GrammarSpec.json_schema(self.schema_, strict=False)
        if self.type != "json_schema":
            return GrammarSpec("json_object") if self.type == "json_object" else None
        if self.json_schema is None or self.json_schema.schema_ is None:
            refuse("response_format", "has no json_schema.schema: send one")
        return GrammarSpec.json_schema(self.json_schema.schema_, strict=bool(self.json_schema.strict))


class OpenAIRequest(ProgressRequest):
    """The fields that chats and completions share."""

    max_tokens: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="Choices for one prompt, which is prefilled once."
    )
    stop: Stops | None = None
    logit_bias: Annotated[dict[TokenId, float], Field(max_length=MAX_CLIENT_BIASES, fail_fast=True)] | None = Field(
        None, description="From token ids to what is added to their logits."
    )
    response_format: ResponseFormat | None = None
    guided_regex: Text | None = Field(None, description="A regular expression that the answer must match.")
    grammar: Text | None = Field(None, description="A grammar in Lark or GBNF that the answer must match.")
    json_schema: JsonObject | bool | None = Field(None, description="llama.cpp's name for such a response_format.")
    stream_options: StreamOptions | None = None
    include_origins: bool | None = Field(None, description="Report how each token was generated.")

    unsupported = UNSUPPORTED

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "only with stream: true")

    def requested_grammar(self) -> tuple[GrammarSpec | None, str]:
        """Return what the answer must match, and the field that says so."""
        given = {
            "response_format": self.response_format.grammar() if self.response_format is not None else None,
            "guided_regex": GrammarSpec("regex", self.guided_regex) if self.guided_regex is not None else None,
            "grammar": GrammarSpec("lark", self.grammar) if self.grammar is not None else None,
            "json_schema": (
                GrammarSpec.json_schema(self.json_schema, strict=False) if self.json_schema is not None else None
            ),
        }
        fields = [field for field, spec in given.items() if spec is not None] or ["response_format"]
        if len(fields) > 1:
            refuse(fields[1], f"{' and '.join(fields)} cannot be combined: leave out one of them")
        return given[fields[0]], fields[0]

    @property
    def answers(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def reported(self) -> int | None:
        """Return how many of the most probable tokens to report beside each token; None: no report."""
        raise NotImplementedError

    def params(self, left: int) -> dict[str, Any]:
        most, top = self.most_tokens, self.reported
        return {
            "max_tokens": left if most in (None, NO_LIMIT) else most,
            "stop": as_tuple(self.stop),
            "logit_bias": self.logit_bias or {},
            "logprobs": top is not None,
            "top_logprobs": top or 0,
        }


class ChatCompletionRequest(OpenAIRequest):
    messages: BoundedList[ChatMessage] = Field(min_length=1)
    max_completion_tokens: TokenLimit | None = Field(None, description="max_tokens, and comes before it.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ToolList[OpenAITool] | None = None
    tool_choice: Literal["none", "auto", "required"] | OpenAITool | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: one call, where one is required.")
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = Field(None, description="Most tokens of reasoning.")
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = Field(None, description="False: end the prompt with the last message.")
    continue_final_message: bool | None = Field(None, description="Continue the last message, an assistant's.")

    def check(self) -> None:
        super().check()
        if self.continue_final_message and self.add_generation_prompt:
            refuse("continue_final_message", "contradicts add_generation_prompt: leave out one of them")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            refuse("continue_final_message", "the last message is not the assistant's: send one that is")
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "only with logprobs: true")

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reported(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    async def make_prompt(self, served: LoadedModel, work: Preparation) -> Prompt:
        return await chat_prompt(self._chat, served, work)

    def _chat(self) -> Chat:
        grammar, grammar_field = self.requested_grammar()
        thinking, thinking_field = self._thinking()
        choice = self.tool_choice or "auto"
        effort = self.reasoning_effort
        budget = REASONING_BUDGETS.get(effort or "high") if self.thinking_budget is None else self.thinking_budget
        return Chat(
            [message.for_template() for message in self.messages],
            [tool.for_template() for tool in self.tools or ()],
            tool_choice=choice if isinstance(choice, str) else "auto",
            tool=choice.function.name if isinstance(choice, OpenAITool) else None,
            parallel_calls=self.parallel_tool_calls is not False,
            thinking=thinking,
            thinking_field=thinking_field,
            budget=budget,
            budget_field="reasoning_effort" if self.thinking_budget is None else "thinking_budget",
            template_options=({"reasoning_effort": effort} if effort else {}) | (self.chat_template_kwargs or {}),
            grammar=grammar,
            grammar_field=grammar_field,
            generation_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            continues=bool(self.continue_final_message),
            body=self,
        )

    def _thinking(self) -> tuple[bool | None, str]:
        """Return whether to think, and the field that says so."""
        effort, option = self.reasoning_effort, (self.chat_template_kwargs or {}).get("enable_thinking")
        said = {
            "enable_thinking": self.enable_thinking,
            "reasoning_effort": None if effort is None else effort != "none",
            "chat_template_kwargs": None if option is None else bool(option),
        }
        fields = [field for field, value in said.items() if value is not None] or ["enable_thinking"]
        for field in fields:
            if said[field] != said[fields[0]]:
                refuse(field, f"contradicts {fields[0]}: leave out one of them")
        return said[fields[0]], fields[0]


class CompletionRequest(OpenAIRequest):
    prompt: Text | TokenIds | BoundedList[Text] | BoundedList[TokenIds] = Field(
        description="Text or token ids, or a list of either."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="How many of the most probable tokens to report; 0: only its own."
    )
    parse_special: bool | None = Field(
        None, description="False: the text of an added token, such as <|im_end|>, is plain text in `prompt`."
    )

    unsupported = UNSUPPORTED | dict.fromkeys(CHAT_ONLY, NO_EFFECT)

    def check(self) -> None:
        super().check()
        if (answers := len(self._several or ("",)) * (self.n or 1)) > MAX_ANSWERS:
            refuse("prompt", f"{answers} answers to its prompts; at most {MAX_ANSWERS} in one request: send fewer")

    def parts(self) -> Sequence[Self]:
        return [self.model_copy(update={"prompt": each}) for each in self._several] or [self]

    @property
    def _several(self) -> Sequence[TextPrompt]:
        """Return the prompts of a list of them."""
        if not isinstance(self.prompt, list) or (self.prompt and isinstance(self.prompt[0], int)):
            return ()
        return cast(Sequence[TextPrompt], self.prompt)

    @property
    def most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    @property
    def reported(self) -> int | None:
        return self.logprobs

    async def make_prompt(self, served: LoadedModel, work: Preparation) -> Prompt:
        parse_special = self.parse_special is not False
        prompt = cast(TextPrompt, self.prompt)  # one of its `parts`
        grammar = await work.run(self.requested_grammar)
        return await text_prompt(prompt, *grammar, served, work, parse_special=parse_special)
