"""What a request may ask of its answer, checked before any work is done. Names are mlx-lm's and OpenAI's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from ..cards import MAX_K
from ..errors import RequestError
from .grammar import GrammarSpec

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256  # every token is held against all beginnings of every stop string
MAX_BIASES = 1024
MAX_CONTEXT_SIZE = 4096
MAX_TOP_LOGPROBS = 20

Rule = Literal["auto", "ratio", "coupled", "optimistic"]


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments, for type checkers and editors; see there."""

    min_tokens: int
    stop_ids: Collection[int]
    stop: Collection[str]
    temperature: float
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Collection[int]
    top_k: int
    logit_bias: Mapping[int, float]
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    presence_context_size: int | None
    frequency_penalty: float
    frequency_context_size: int | None
    grammar: GrammarSpec | None
    seed: int | None
    logprobs: bool
    top_logprobs: int
    accept: Rule


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is generated. Values out of range raise RequestError.

    Args:
        max_tokens: Most tokens to generate.
        min_tokens: No stop id may be generated before so many tokens.
        stop_ids: Token ids that end the answer, besides the tokenizer's own.
        stop: Strings that end the answer; they are not part of its text.
        temperature: 0 is greedy.
        top_p: Keep the smallest set of tokens with this probability mass; 1 keeps all.
        min_p: Drop tokens less probable than this share of the most probable one's probability.
        min_tokens_to_keep: Tokens that min_p never drops.
        xtc_probability: Chance of excluding top choices at a position.
        xtc_threshold: Probability from which a token is a top choice.
        xtc_special_tokens: Token ids that XTC never excludes.
        top_k: Keep the k most probable tokens; 0 keeps all.
        logit_bias: Added to the logits, by token id.
        repetition_penalty: Divide (or multiply, if negative) the logits of recent tokens by this.
        repetition_context_size: How many tokens are recent, prompt included.
        presence_penalty: Subtracted from the logits of tokens that occurred.
        presence_context_size: In how many last tokens, prompt included. None: in all generated ones (OpenAI's).
        frequency_penalty: Subtracted from the logits of a token for each time it occurred.
        frequency_context_size: As presence_context_size.
        grammar: What the answer must match: a JSON Schema, a regular expression or a Lark grammar.
        seed: Makes sampled output repeatable, for every depth and batch.
        logprobs: Report the log-probability of every generated token.
        top_logprobs: And those of so many best alternatives.
        k: Drafts per step, or "auto": as many as pay.
        accept: Acceptance rule: "ratio" (speculative sampling), "coupled" (shared noise; the default with a seed),
            "optimistic" (accept everything: not exact), or "auto".
    """

    max_tokens: int = 256
    min_tokens: int = 0  # no stop id before
    stop_ids: Collection[int] = ()
    stop: Collection[str] = ()

    # mlx-lm's sampler, in its order: top_p, min_p, XTC and top_k on the model's probabilities, then temperature.
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: Collection[int] = ()
    top_k: int = 0  # 0: all

    # mlx-lm's logits processors, in its order. A context size counts the last tokens, prompt included. None, for
    # presence and frequency, counts every generated token and none of the prompt, as OpenAI's API does.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int | None = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int | None = 20

    grammar: GrammarSpec | None = None
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    k: int | Literal["auto"] = "auto"  # drafts a round
    accept: Rule = "auto"  # seeded requests are coupled, others take the ratio rule

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in _NULLABLE:
                continue
            if not _is_number(value) or not low <= value <= high:
                raise RequestError(f"{name} is {value!r}; it must be a number from {low} to {high}")
        for name in _WHOLE:
            if not isinstance(getattr(self, name), int) and not (name in _NULLABLE and getattr(self, name) is None):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be a whole number")
        if self.seed is not None and not (_is_id(self.seed) and -(2**63) <= self.seed < 2**64):
            raise RequestError(f"seed is {self.seed!r}; it must be a whole number of 64 bits, or None")
        if not isinstance(self.logprobs, bool):
            raise RequestError(f"logprobs is {self.logprobs!r}; it must be true or false")
        if self.k != "auto" and (not isinstance(self.k, int) or isinstance(self.k, bool) or not 0 <= self.k <= MAX_K):
            raise RequestError(f"k is {self.k!r}; it must be 'auto' or a whole number from 0 to {MAX_K}")
        if self.accept not in ("auto", "ratio", "coupled", "optimistic"):
            raise RequestError(f"accept is {self.accept!r}; it must be auto, ratio, coupled or optimistic")
        if self.accept in ("ratio", "optimistic") and self.seed is not None:
            raise RequestError(
                f"accept is {self.accept!r} and seed is {self.seed}: only the coupled rule keeps a seeded answer the "
                "same for every k and every batch. Leave out one of the two"
            )
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}")
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty is 0; it must be more than 0 (1 leaves the text as it is)")
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}, but logprobs is false: set logprobs to true")
        if not _is_list(self.stop) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError("stop must be a list of non-empty strings")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has an entry of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed"
            )
        for name in ("stop_ids", "xtc_special_tokens"):
            if not _is_list(getattr(self, name)) or not all(map(_is_id, getattr(self, name))):
                raise RequestError(f"{name} must be a list of token ids")
        for name, values in (("stop", self.stop), ("stop_ids", self.stop_ids)):
            if len(values) > MAX_STOPS:
                raise RequestError(f"{name} has {len(values)} entries; at most {MAX_STOPS} are allowed")
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise RequestError(f"grammar is a {type(self.grammar).__name__}; it must be a GrammarSpec")
        if not isinstance(self.logit_bias, Mapping) or not all(map(_is_id, self.logit_bias)):
            raise RequestError("logit_bias must map token ids to numbers")
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_BIASES} are allowed")
        for token, bias in self.logit_bias.items():
            if not _is_number(bias) or not -100 <= bias <= 100:
                raise RequestError(f"logit_bias of token {token} is {bias!r}; it must be a number from -100 to 100")

    def check_tokens(self, vocabulary: int) -> None:
        """Refuse a bias, a stop or an exception for a token that the model does not have."""
        for name in ("logit_bias", "stop_ids", "xtc_special_tokens"):
            wrong = next((t for t in getattr(self, name) if not 0 <= t < vocabulary), None)
            if wrong is not None:
                raise RequestError(f"{name} names the token id {wrong}: ids go from 0 to {vocabulary - 1}")

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    @property
    def rule(self) -> Literal["ratio", "coupled", "optimistic"]:
        """Greedy is the coupled rule at temperature 0: a draft is right when it is the target's own choice."""
        if self.accept == "auto":
            return "ratio" if self.sampled and self.seed is None else "coupled"
        return "coupled" if self.accept == "ratio" and not self.sampled else self.accept

    @property
    def context_size(self) -> int:
        """How many of the last tokens the penalties look at; 0 where there are none."""
        sizes = [0]
        if self.repetition_penalty != 1:
            sizes.append(self.repetition_context_size)
        if self.presence_penalty:
            sizes.append(self.presence_context_size or 0)
        if self.frequency_penalty:
            sizes.append(self.frequency_context_size or 0)
        return max(sizes)

    @property
    def counts_generated(self) -> bool:
        """Whether a penalty looks at all generated tokens."""
        presence = self.presence_penalty != 0 and self.presence_context_size is None
        return presence or (self.frequency_penalty != 0 and self.frequency_context_size is None)

    def as_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("min_tokens_to_keep", 1, 2**31 - 1),
    ("xtc_probability", 0, 1),
    ("xtc_threshold", 0, 0.5),
    ("top_k", 0, 2**31 - 1),
    ("repetition_penalty", 0, 100),
    ("repetition_context_size", 1, MAX_CONTEXT_SIZE),
    ("presence_penalty", -100, 100),
    ("presence_context_size", 1, MAX_CONTEXT_SIZE),
    ("frequency_penalty", -100, 100),
    ("frequency_context_size", 1, MAX_CONTEXT_SIZE),
    ("top_logprobs", 0, MAX_TOP_LOGPROBS),
)
_NULLABLE = ("presence_context_size", "frequency_context_size")
_WHOLE = (
    "max_tokens", "min_tokens", "min_tokens_to_keep", "top_k", "top_logprobs",
    "repetition_context_size", "presence_context_size", "frequency_context_size",
)  # fmt: skip
