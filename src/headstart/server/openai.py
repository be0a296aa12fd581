"""What OpenAI's clients ask for, and how it becomes a request of the engine's.

Every field may be null, which is the same as leaving it out. A field that is not here is ignored, and named in the
answer's stats; one that is known but cannot be honoured is refused by its name.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..engine import Request
from ..sampling import GrammarSpec, SamplingParams
from ..sampling_params import MAX_BIASES, MAX_TOP_LOGPROBS
from .chat import Chat, shape_of
from .drafts import Drafts, depth
from .errors import refuse
from .openai_chat import Message, NamedTool, Tool
from .prepare import Preparation
from .prompt import Prompt
from .served_model import ServedModel
from .shape import Json, Listed, Shape, Text, Tools

# Known, and harmless only at these values.
NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "prompt_logprobs": (),
}
# Of a chat, and so of no use to a completion.
OF_CHATS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "enable_thinking": (False,),
    "reasoning_effort": ("none",),
    "thinking_budget": (),
    "chat_template_kwargs": ({},),
    "top_logprobs": (0,),
}
OPENAI_PENALTIES = {"presence_context_size": None, "frequency_context_size": None}  # count all generated tokens
Ids = Annotated[list[int], Field(fail_fast=True)]
MOST_CHOICES = 16
MOST_BIASES = MAX_BIASES - 1  # a chat that may not call has one of its own
# Tokens of thought. Beyond these a model thinks as long as it likes.
EFFORTS = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192}


def _few_biases(biases: object) -> object:
    """Counted before any of them is looked at."""
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise ValueError(f"it has {len(biases)} entries; at most {MOST_BIASES} are allowed")
    return biases


class StreamOptions(Shape):
    include_usage: bool | None = None


class JsonSchema(Shape):
    name: Text | None = None
    description: Text | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> GrammarSpec | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return GrammarSpec("json_object")
        if self.json_schema is None or self.json_schema.schema_ is None:
            refuse("response_format", "has no json_schema.schema: send one")
        return shape_of(self.json_schema.schema_, "response_format")


class Asked(Shape):
    """What chats and completions have in common. The names are SamplingParams' but for the last few."""

    model: Text | None = Field(None, description="By its id, folder or hub id; left out, the one that is served.")
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = Field(None, description="Answers to one prompt, which is read once.")
    stop: Text | Listed[Text] | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_biases)] = Field(
        None, description="From token ids to what is added to their logits."
    )
    response_format: ResponseFormat | None = None
    guided_regex: Text | None = Field(None, description="A regular expression that the answer matches.")
    grammar: Text | None = Field(None, description="A Lark grammar of the answer.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    num_draft_tokens: Drafts = None
    acceptance: Literal["auto", "ratio", "coupled", "optimistic"] | None = None
    include_origins: bool | None = Field(None, description="Say of every token where it came from.")

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    def ignored(self) -> list[str]:
        return sorted({name for name in self.unknown() if name not in self.not_honoured()})

    def not_honoured(self) -> dict[str, tuple[Any, ...]]:
        return NOT_HONOURED

    def check(self) -> None:
        """Refuse what cannot be honoured as a whole."""
        for name, value in (self.model_extra or {}).items():
            harmless = self.not_honoured().get(name)
            if harmless is None or value is None:
                continue
            if not any(value == each and type(value) is type(each) for each in harmless):
                refuse(name, "this server does not do that: leave it out", "unsupported")
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "only with stream: true")
        for name in ("presence_penalty", "frequency_penalty"):
            if (value := getattr(self, name)) is not None and not -2 <= value <= 2:
                refuse(name, f"is {value:g}; it must be a number from -2 to 2")
        if not 1 <= self.choices <= MOST_CHOICES:
            refuse("n", f"is {self.n}; it must be a whole number from 1 to {MOST_CHOICES}")

    def constraint(self) -> tuple[GrammarSpec | None, str]:
        """What the answer must look like, and the field that says so."""
        found: dict[str, GrammarSpec] = {}
        if self.response_format is not None and (spec := self.response_format.grammar()) is not None:
            found["response_format"] = spec
        if self.guided_regex is not None:
            found["guided_regex"] = GrammarSpec("regex", self.guided_regex)
        if self.grammar is not None:
            found["grammar"] = GrammarSpec("lark", self.grammar)
        if len(found) > 1:
            field = list(found)[1]
            refuse(field, f"{' and '.join(found)} cannot both hold: leave out one of them")
        return next(((spec, field) for field, spec in found.items()), (None, "response_format"))

    async def read(self, served: ServedModel, work: Preparation) -> Prompt:
        raise NotImplementedError

    def most_tokens(self, left: int) -> int:
        raise NotImplementedError

    def wanted_logprobs(self) -> int | None:
        """How many of the best tokens to tell of beside the one that was said. None: nothing of any."""
        raise NotImplementedError

    def request(self, prompt: Prompt, context: int) -> Request:
        """A RequestError names the field that is out of bounds."""
        alike = set(SamplingParams.__dataclass_fields__) & set(Asked.model_fields) - {"grammar"}
        fields = {name: value for name in alike if (value := getattr(self, name)) is not None}
        fields["max_tokens"] = self.most_tokens(context - len(prompt.tokens))
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        bias = {_token_id(token): bias for token, bias in (self.logit_bias or {}).items()}
        fields["logit_bias"] = {**bias, **prompt.bias}
        if (top := self.wanted_logprobs()) is not None:
            fields |= {"logprobs": True, "top_logprobs": top}
        fields |= {"grammar": prompt.grammar, "accept": self.acceptance or "auto", "k": depth(self.num_draft_tokens)}
        params = SamplingParams(**{**prompt.sampling, **fields, **OPENAI_PENALTIES})
        return Request(prompt.tokens, params, n=self.choices, score=self.score())

    def score(self) -> Literal["no", "too", "only"]:
        """Whether to tell what the model thought of the prompt."""
        return "no"


class ChatRequest(Asked):
    messages: Listed[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call where one must come.")
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_budget: int | None = Field(None, description="Most tokens of thought.")
    chat_template_kwargs: Json | None = None

    def ignored(self) -> list[str]:
        """And what is read otherwise than it was sent."""
        found = set(super().ignored())
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        if any(call.function.cut_off for call in calls):
            found.add("messages[].tool_calls[].function.arguments: cut off")
        free = (self.tool_choice or "auto") == "auto" and self.constraint()[0] is None
        if self.tools and self.parallel_tool_calls is False and free:
            found.add("parallel_tool_calls")  # nothing keeps a model from calling twice
        return sorted(found)

    def most_tokens(self, left: int) -> int:
        """Without a limit an answer may go on to the end of the context."""
        given = {most for most in (self.max_completion_tokens, self.max_tokens) if most is not None}
        if len(given) > 1:
            refuse("max_completion_tokens", "and max_tokens differ: give one of them")
        return given.pop() if given else left

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "only with logprobs: true")
        return self.top_logprobs or 0 if self.logprobs else None

    async def read(self, served: ServedModel, work: Preparation) -> Prompt:
        return await served.read_chat(self._chat, work)

    def _chat(self) -> Chat:
        grammar, grammar_field = self.constraint()
        thinking, thinking_field = self._thinking()
        choice = self.tool_choice or "auto"
        template = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            template.setdefault("reasoning_effort", self.reasoning_effort)
        return Chat(
            [message.for_template() for message in self.messages],
            [tool.for_template() for tool in self.tools or ()],
            tool_choice=choice if isinstance(choice, str) else "auto",
            tool=choice.function.name if isinstance(choice, NamedTool) else None,
            several=self.parallel_tool_calls is not False,
            thinking=thinking,
            thinking_field=thinking_field,
            budget=self._budget(),
            template=template,
            grammar=grammar,
            grammar_field=grammar_field,
        )

    def _thinking(self) -> tuple[bool | None, str]:
        """Whether to think, and the field that says so. There are three, which must agree."""
        words = self.chat_template_kwargs or {}
        said = {
            "enable_thinking": self.enable_thinking,
            "chat_template_kwargs": bool(words["enable_thinking"]) if "enable_thinking" in words else None,
            "reasoning_effort": self.reasoning_effort != "none" if self.reasoning_effort is not None else None,
        }
        told = [(value, field) for field, value in said.items() if value is not None]
        if len({value for value, _ in told}) > 1:
            fields = " and ".join(field for _, field in told)
            refuse(told[-1][1], f"{fields} do not agree whether to think: give one of them")
        return told[-1] if told else (None, "enable_thinking")

    def _budget(self) -> int | None:
        if self.thinking_budget is not None:
            return self.thinking_budget
        return EFFORTS.get(self.reasoning_effort or "high")


class CompletionRequest(Asked):
    prompt: Text | Ids | Listed[Text] | Listed[Ids] = Field(
        description="Text or token ids, or either alone in a list."
    )
    logprobs: int | None = Field(None, description="How many of the best tokens to tell of, 0 for the one said.")
    echo: bool | None = Field(None, description="Begin with the prompt; max_tokens may then be 0.")
    parse_special: bool | None = Field(
        None, description="False: the text of an added token, such as <|im_end|>, is text in `prompt`."
    )

    def not_honoured(self) -> dict[str, tuple[Any, ...]]:
        return NOT_HONOURED | OF_CHATS

    def most_tokens(self, left: int) -> int:
        if self.score() == "only":
            return 1  # which is not said
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's

    def score(self) -> Literal["no", "too", "only"]:
        if not self.echo:
            return "no"
        return "only" if self.max_tokens == 0 else "no" if self.logprobs is None else "too"

    def wanted_logprobs(self) -> int | None:
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            refuse("logprobs", f"is {self.logprobs}; it must be a whole number from 0 to {MAX_TOP_LOGPROBS}")
        return self.logprobs

    async def read(self, served: ServedModel, work: Preparation) -> Prompt:
        parse_special = self.parse_special is not False
        return await served.read_text(self.prompt, *self.constraint(), work, parse_special=parse_special)


def _token_id(token: str) -> int:
    if not (token.isascii() and token.isdecimal() and len(token) < 20):
        refuse("logit_bias", f"{token[:20]!r} is not a token id: ids are whole numbers")
    return int(token)
