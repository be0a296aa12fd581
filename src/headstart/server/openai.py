"""What OpenAI's clients ask for, and how it becomes a request of the engine's.

Every field may be null, which is the same as leaving it out. A field that is not here is ignored, and named in the
answer's stats; one that is known but cannot be honoured is refused by its name.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..cards import MAX_K
from ..sampling import SamplingParams
from .errors import Refusal

# Known, and harmless only at these values.
NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "enable_thinking": (),
    "reasoning_effort": (),
    "chat_template_kwargs": ({},),
}


def _whole(text: str) -> str:
    """JSON can hold half a character of two halves, which nothing can read or write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("Text should not hold half a surrogate pair") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]


class Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(Shape):
    include_usage: bool | None = None


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
    stop: Text | list[Text] | None = None
    logit_bias: dict[str, float] | None = Field(None, description="From token ids to what is added to their logits.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    num_draft_tokens: int | Literal["auto"] | None = Field(None, description="Drafts a round; 0 drafts nothing.")
    acceptance: Literal["auto", "ratio", "coupled", "optimistic"] | None = None
    include_origins: bool | None = Field(None, description="Say of every token where it came from.")

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def ignored(self) -> list[str]:
        return sorted({name for name in _unknown(self) if name not in NOT_HONOURED})

    def check(self) -> None:
        """Refuse what cannot be honoured as a whole."""
        for name, value in (self.model_extra or {}).items():
            harmless = NOT_HONOURED.get(name)
            if harmless is None or value is None:
                continue
            if not any(value == each and type(value) is type(each) for each in harmless):
                raise Refusal(
                    400, f"{name}: this server does not do that: leave it out", param=name, code="unsupported"
                )
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options: only with stream: true", param="stream_options", code="invalid_value")
        if isinstance(self.num_draft_tokens, int) and self.num_draft_tokens < 0:
            raise Refusal(
                400,
                f"num_draft_tokens is {self.num_draft_tokens}; it must be 'auto', 0 or more",
                param="num_draft_tokens",
                code="invalid_value",
            )

    def params(self, max_tokens: int) -> SamplingParams:
        """A RequestError names the field that is out of bounds."""
        alike = set(SamplingParams.__dataclass_fields__) & set(Asked.model_fields)
        fields = {name: value for name in alike if (value := getattr(self, name)) is not None}
        fields["max_tokens"] = max_tokens
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            fields["logit_bias"] = {_token_id(token): bias for token, bias in self.logit_bias.items()}
        if self.num_draft_tokens is not None:
            k = self.num_draft_tokens
            fields["k"] = k if k == "auto" else min(k, MAX_K)
        return SamplingParams(**fields, accept=self.acceptance or "auto")

    @property
    def clamped_to(self) -> int | None:
        """Beyond what any model drafts. What this one does not is the engine's to say."""
        k = self.num_draft_tokens
        return MAX_K if isinstance(k, int) and k > MAX_K else None


class TextPart(Shape):
    type: Literal["text"]
    text: Text


class Message(Shape):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: they say system where OpenAI says developer, and want one text."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Asked):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, description="The same as max_tokens.")

    def most_tokens(self, left: int) -> int:
        """Without a limit an answer may go on to the end of the context."""
        given = {most for most in (self.max_completion_tokens, self.max_tokens) if most is not None}
        if len(given) > 1:
            message = "max_tokens and max_completion_tokens differ: give one of them"
            raise Refusal(400, message, param="max_completion_tokens", code="invalid_value")
        return given.pop() if given else left


class CompletionRequest(Asked):
    prompt: Text | list[int] | list[Text] = Field(description="Text, the text alone in a list, or token ids.")

    def most_tokens(self, left: int) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's


def _unknown(shape: Shape, within: str = "") -> Iterator[str]:
    """The names of fields that are not ours, such as `messages[].name`."""
    yield from (within + name for name in shape.model_extra or {})
    for name in type(shape).model_fields:
        value = getattr(shape, name)
        if isinstance(value, Shape):
            yield from _unknown(value, f"{within}{name}.")
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, Shape):
                    yield from _unknown(each, f"{within}{name}[].")


def _token_id(token: str) -> int:
    if not (token.isascii() and token.isdecimal() and len(token) < 20):
        message = f"logit_bias: {token[:20]!r} is not a token id: ids are whole numbers"
        raise Refusal(400, message, param="logit_bias", code="invalid_value")
    return int(token)
