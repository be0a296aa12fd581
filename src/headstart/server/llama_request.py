"""Bodies of /completion, llama.cpp's own, and how they become a request for the engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Self, cast

from pydantic import Field

from ..sampling import GrammarSpec
from ..sampling_params import MAX_BIASES, MAX_CONTEXT_SIZE, MAX_TOP_LOGPROBS
from .errors import refuse
from .loaded_model import LoadedModel
from .openai_request import MAX_ANSWERS
from .prepare import Preparation
from .prompt import Prompt, text_prompt
from .request_fields import BoundedList, JsonObject, Penalty, ProgressRequest, RequestModel, Stops, Text, as_tuple

OFF: dict[str, tuple[object, ...]] = {  # the values that leave off what is not supported here
    "mirostat": (0,), "typical_p": (1,), "dynatemp_range": (0,), "dry_multiplier": (0,),
    "post_sampling_probs": (False,), "lora": ([],), "image_data": ([],), "n_indent": (0,), "n_cmpl": (1,),
    "t_max_predict_ms": (0, -1),
}  # fmt: skip
RANDOM_SEEDS = (-1, 2**32 - 1)
REPEAT_LAST_N = 64  # llama.cpp's default
NEVER = -100.0  # a bias


class PromptObject(RequestModel):
    prompt_string: Text
    multimodal_data: BoundedList[Text] | None = None


MixedPrompt = Annotated[list[int | Text], Field(fail_fast=True)]
LlamaPrompt = Text | MixedPrompt | PromptObject
Added = float | bool
Bias = Annotated[list[int | Added | Text], Field(min_length=2, max_length=2)]


class LlamaCompletionRequest(ProgressRequest):
    prompt: LlamaPrompt | BoundedList[LlamaPrompt] = Field(
        description="A text, a list of token ids and texts, an object with a `prompt_string`, or a list of these."
    )
    n_predict: Annotated[int, Field(ge=-1)] | None = Field(None, description="Most tokens; -1: all that fit.")
    ignore_eos: bool | None = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        None, description="How many of the most probable tokens to report."
    )
    stop: Stops | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, Field(ge=0, le=MAX_CONTEXT_SIZE)] | None = None
    logit_bias: (
        Annotated[list[Bias], Field(max_length=MAX_BIASES, fail_fast=True)]
        | Annotated[dict[Text, Added], Field(max_length=MAX_BIASES, fail_fast=True)]
        | None
    ) = Field(None, description="What is added to the logits of a token, or of those of a text; false: never.")
    grammar: Text | None = None
    json_schema: JsonObject | bool | None = None
    cache_prompt: bool | None = Field(None, description="Without effect: cached prefixes change no token.")
    return_tokens: bool | None = None
    response_fields: BoundedList[Text] | None = None

    unsupported = OFF

    def check(self) -> None:
        super().check()
        if self.n_predict == 0:
            refuse("n_predict", "no tokens: ask for at least one")
        prompts = [part.prompt for part in self.parts()]
        if len(prompts) > MAX_ANSWERS:
            refuse("prompt", f"has {len(prompts)} prompts; at most {MAX_ANSWERS} in one request: send fewer")
        if any(isinstance(prompt, PromptObject) and prompt.multimodal_data for prompt in prompts):
            refuse("prompt", "multimodal_data is not supported by this server: send images in a chat", "unsupported")

    @property
    def has_several(self) -> bool:
        """Return whether the prompt is a list of prompts. One with a token id among its texts is one prompt."""
        return isinstance(self.prompt, list) and not any(isinstance(each, int) for each in self.prompt)

    def parts(self) -> Sequence[Self]:
        prompts = cast(list[LlamaPrompt], self.prompt) if self.has_several else [self.prompt]
        return [self.model_copy(update={"prompt": prompt}) for prompt in prompts] or [self]

    async def make_prompt(self, served: LoadedModel, work: Preparation) -> Prompt:
        grammar = await work.run(self._grammar)
        tokens = await self._tokens(work)
        prompt = await text_prompt(tokens, *grammar, served, work, parse_special=True)
        return replace(prompt, bias=await self._biases(work))

    def params(self, left: int) -> dict[str, Any]:
        most = left if self.n_predict is None or self.n_predict < 0 else self.n_predict
        return {
            "max_tokens": most,
            "min_tokens": most if self.ignore_eos else self.min_tokens or 0,
            "seed": None if self.seed in RANDOM_SEEDS else self.seed,
            "top_n_sigma": max(self.top_n_sigma or 0.0, 0.0),  # -1, llama.cpp's default, is off
            "stop": as_tuple(self.stop),
            "logit_bias": {},  # see `make_prompt`
            "logprobs": bool(self.n_probs),
            "top_logprobs": self.n_probs or 0,
            **self._repetition(),
        }

    def _repetition(self) -> dict[str, Any]:
        recent = REPEAT_LAST_N if self.repeat_last_n is None else self.repeat_last_n
        if self.repeat_penalty is None or not recent:
            return {}
        return {"repetition_penalty": self.repeat_penalty, "repetition_context_size": recent}

    def _grammar(self) -> tuple[GrammarSpec | None, str]:
        if self.json_schema is None:
            return (GrammarSpec("lark", self.grammar) if self.grammar else None), "grammar"
        if self.grammar:
            refuse("grammar", "json_schema and grammar cannot be combined: leave out one of them")
        return GrammarSpec.json_schema(self.json_schema, strict=False), "json_schema"

    async def _tokens(self, work: Preparation) -> str | list[int]:
        """Return the prompt of one of the `parts`, in token ids unless it is a text."""
        match self.prompt:
            case str():
                return self.prompt
            case PromptObject():
                return self.prompt.prompt_string
        tokens: list[int] = []
        for i, piece in enumerate(cast(list[int | str], self.prompt)):
            if isinstance(piece, int):
                tokens.append(piece)
            else:
                tokens += await work.encode(piece, "prompt", kind="chat" if i else "text")
        return tokens

    async def _biases(self, work: Preparation) -> dict[int, float]:
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias or ()
        biases: dict[int, float] = {}
        for token, value in pairs:
            if not isinstance(value, int | float) or value is True:
                refuse("logit_bias", "what is added to a logit is a number, or false")
            added = NEVER if value is False else float(value)
            if isinstance(token, str) and not token.isdecimal():
                biases |= dict.fromkeys(await work.encode(token, "logit_bias", kind="chat"), added)
            else:
                biases[int(token)] = added
        return biases
