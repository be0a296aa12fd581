"""The types of fields in request bodies, and what the requests of both APIs have in common.

Every field may be null, which is the same as leaving it out. A field that is not known is ignored and listed in
`generation_stats.ignored_fields`; one that is known but cannot be honoured is rejected by name.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, from_json

from ..engine import Request
from ..limits import MAX_K
from ..sampling import SamplingParams
from ..sampling_params import MAX_STOPS
from .errors import refuse
from .loaded_model import LoadedModel
from .markup import loads, nested_too_deeply
from .prepare import Preparation
from .prompt import Prompt

NO_EFFECT: tuple[object, ...] = (False, 0, "", "none", "auto", [], {}, ["text"])  # of an unsupported field
MAX_ITEMS = 2**14  # messages, and parts of a message
MAX_TOOLS = 512  # compiling the grammar of a call of any of them takes a second
PRIORITIES = {"interactive": 0, "batch": 1}
MAX_PRIORITY = 100
# Tokens of reasoning by effort; unlimited above these.
REASONING_BUDGETS = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192}

Element = TypeVar("Element")


def let_others_run(value: object) -> object:
    """Return an element of a list as it is. Pydantic lets other threads run only while it calls Python."""
    return value


# Bodies can hold many elements. Only the first error is reported: collecting all takes long.
BoundedList = Annotated[
    list[Annotated[Element, BeforeValidator(let_others_run)]], Field(max_length=MAX_ITEMS, fail_fast=True)
]
ToolList = Annotated[list[Element], Field(max_length=MAX_TOOLS, fail_fast=True)]


def as_tuple(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return stop strings, which may be one."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


class RequestModel(BaseModel):
    """A part of a request body. Unknown fields are kept, so that they can be listed."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def unknown_fields(self, prefix: str = "") -> Iterator[str]:
        """Yield the paths of fields that are not known, such as `messages[].name`."""
        yield from (prefix + name for name, value in (self.model_extra or {}).items() if value is not None)
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, RequestModel):
                yield from value.unknown_fields(f"{prefix}{name}.")
            for each in value if isinstance(value, list) else ():
                if isinstance(each, RequestModel):
                    yield from each.unknown_fields(f"{prefix}{name}[].")


def reject_media(kind: object) -> object:
    """Validate the type of a content part: say clearly what is not supported."""
    media = {"image": "image", "document": "document", "file": "file", "input_file": "file", "input_audio": "audio"}
    media |= dict.fromkeys(("video", "video_url", "input_video"), "video")
    if isinstance(kind, str) and kind in media:
        raise PydanticCustomError("unsupported", f"{media[kind]} input is not supported here")
    return kind


def reject_media_part(part: Any) -> Any:
    if isinstance(part, dict):
        reject_media(part.get("type"))
    return part


def check_object(value: dict[str, Any]) -> dict[str, Any]:
    """Templates and grammars must be able to write it."""
    if nested_too_deeply(value):
        raise ValueError("Object should not be nested so deeply")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises a ValueError
    return value


def parse_arguments(arguments: object) -> object:
    """Return the arguments of a call as an object, and as text where they cannot be one.

    Clients send back what the model wrote: malformed JSON, or JSON that a token limit cut off, which is parsed as far
    as it goes. Some send such text as a JSON string.
    """
    value: object = arguments
    try:
        if isinstance(arguments, str):
            value = _parse_json(arguments or "{}")
        if not isinstance(value, dict):
            return parse_arguments(value) if isinstance(value, str) else arguments
        return check_object(value)
    except ValueError:
        return arguments if isinstance(arguments, str) else _write(arguments)


def _parse_json(text: str) -> object:
    try:
        return loads(text)
    except ValueError:
        return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")


def _write(value: object) -> object:
    """Return an object that no template could write as text; as it is, to be refused, if it cannot be written."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return value


Text = Annotated[str, Field(min_length=0)]  # with any such limit, half a surrogate pair is refused
JsonObject = Annotated[dict[str, Any], AfterValidator(check_object)]
Arguments = Annotated[JsonObject | Text, BeforeValidator(parse_arguments)]  # of a call in the history
ToolName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Stops = Text | Annotated[BoundedList[Text], Field(max_length=MAX_STOPS)]
TokenLimit = Annotated[int, Field(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
ModelName = Annotated[Text | None, Field(description="Its id, folder or hub id; default: the served model.")]


class GenerationRequest(RequestModel):
    """A request for output. Sampling fields have the names of SamplingParams."""

    model: ModelName = None
    stream: bool | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    seed: int | None = None
    num_draft_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] | None = Field(
        None, description="Drafts per step; 0 disables drafting."
    )
    acceptance: Literal["auto", "ratio", "coupled", "optimistic"] | None = None
    priority: Literal["interactive", "batch"] | int | None = Field(
        None, description="Requests wait while others of a lower number do; interactive is 0, batch 1."
    )

    # Known fields that are rejected, unless they have one of these values.
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    def check(self) -> None:
        """Reject what cannot be honoured, whatever the model."""
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported and value is not None and value not in self.unsupported[name]:
                refuse(name, "not supported by this server: leave it out", "unsupported")

    @property
    def level(self) -> int:
        """Return the priority as a number. None is before interactive: no client can put itself before others."""
        level = PRIORITIES.get(self.priority, 0) if isinstance(self.priority, str) else self.priority or 0
        return min(max(level, 0), MAX_PRIORITY)

    def parts(self) -> Sequence[Self]:
        """Return a request for each prompt. Their answers are the choices of one response."""
        return [self]

    async def make_prompt(self, served: LoadedModel, work: Preparation) -> Prompt:
        """Return the tokens of the prompt, and what else the model makes of the request."""
        raise NotImplementedError

    def params(self, left: int) -> dict[str, Any]:
        """Return the sampling parameters that the body has in a form of its own. The context has room for an answer
        of `left` tokens."""
        raise NotImplementedError

    @property
    def answers(self) -> int:
        """Return how many answers each prompt has."""
        return 1

    def engine_request(self, prompt: Prompt, context: int) -> Request:
        """Return the request for the engine. A RequestError names the field that is out of range."""
        # Fields that SamplingParams has with the same name are copied, unless `params` replaces them. `grammar` is
        # text here, and a GrammarSpec there.
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys() - {"grammar"}
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if given.get("top_k") == -1:  # vLLM's and SGLang's 0, which gateways send
            given["top_k"] = 0
        depth, own = self.num_draft_tokens, self.params(context - len(prompt.tokens))
        params = SamplingParams(**{
            **prompt.recommended,
            **given,
            "grammar": prompt.grammar,
            "accept": self.acceptance or "auto",
            "k": min(depth, MAX_K) if isinstance(depth, int) else "auto",
            # As OpenAI has it, penalties count all generated tokens; so do the makers' recommendations.
            "presence_context_size": None,
            "frequency_context_size": None,
            **own,
            "logit_bias": {**own.get("logit_bias", {}), **prompt.bias},
        })  # fmt: skip
        return Request(prompt.tokens, params, n=self.answers, images=prompt.images)

    def ignored_fields(self) -> list[str]:
        """Return the fields that have no effect."""
        return sorted(set(self.unknown_fields()).difference(self.unsupported))

    def clamped_to(self, engine: int | None) -> int | None:
        """Return the greatest depth used, if more was requested. `engine`: what the engine reports."""
        depth = self.num_draft_tokens
        return MAX_K if engine is None and isinstance(depth, int) and depth > MAX_K else engine


class ProgressRequest(GenerationRequest):
    """A request whose stream can report more, as llama.cpp's server does."""

    return_progress: bool | None = Field(None, description="How far the prompt is read, in `prompt_progress`.")
    timings_per_token: bool | None = Field(None, description="`timings` with every piece of text.")
