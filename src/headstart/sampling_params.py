"""Sampling parameters of a request, validated when they are created. Names follow mlx-lm and OpenAI.

This module imports nothing heavy: clients can build requests without loading mlx.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, TypedDict, get_args

from .errors import RequestError, check_type
from .limits import MAX_K

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 256  # every token's text is compared with every prefix of every stop string
MAX_BIASES = 1024
MAX_CONTEXT_SIZE = 4096
MAX_TOP_LOGPROBS = 20
MAX_INT32 = 2**31 - 1

AcceptRule = Literal["auto", "ratio", "coupled", "optimistic"]
GrammarKind = Literal["json_schema", "json_object", "regex", "lark"]


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar that the answer must match.

    Args:
        kind: Language of the grammar; "json_object" is any JSON object.
        source: A JSON Schema, a regular expression or a Lark grammar.
        strict: Refuse a schema with keywords that no grammar can hold. Otherwise these are left out, and the branches
            of a oneOf may overlap.
    """

    kind: GrammarKind
    source: str = ""
    strict: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise RequestError(
                f"grammar has the kind {self.kind!r}; it must be json_schema, json_object, regex or lark"
            )
        if not isinstance(self.source, str):
            raise RequestError(f"grammar has a source of type {type(self.source).__name__}; it must be text")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, strict: bool = True) -> "GrammarSpec":
        """Return the grammar of a JSON Schema, given as an object or as text.

        The answer's properties come in the order in which the schema lists them.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            return cls("json_schema", text, strict)
        except (TypeError, ValueError) as error:
            raise RequestError(f"grammar is not a JSON Schema: {error}") from error


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keyword arguments, for type checkers and editors."""

    min_tokens: int
    stop_ids: Collection[int]
    stop: Collection[str]
    temperature: float
    top_n_sigma: float
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
    accept: AcceptRule


def _number(default: Any, low: float, high: float, *instead: str | None) -> Any:
    """Return a field for a number in a range, whole unless its default is a float, or one of `instead`."""
    whole = not isinstance(default, float)
    return field(default=default, metadata={"whole": whole, "low": low, "high": high, "instead": instead})


def _plain(value: object) -> object:
    """Return a number of a library, such as numpy's, as Python's."""
    if isinstance(value, Real) and not isinstance(value, (int, float)):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def _check_number(
    name: str, value: object, *, whole: bool, low: float, high: float, instead: tuple[str | None, ...]
) -> None:
    kinds = int if whole else (int, float)
    if value in instead or (isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high):
        return
    allowed = [*map(repr, instead), f"a {'whole ' if whole else ''}number from {low} to {high}"]
    raise RequestError(f"{name} is {value!r}; it must be {' or '.join(allowed)}")


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is generated. Values out of range raise RequestError.

    Args:
        max_tokens: Most tokens to generate.
        min_tokens: Tokens to generate before a stop id may end the answer.
        stop_ids: Token ids that end the answer, besides the tokenizer's own.
        stop: Strings that end the answer; they are not part of its text.
        temperature: 0 is greedy.
        top_n_sigma: Keep tokens whose logit is at most this many standard deviations of all logits below the best; 0
            keeps all.
        top_p: Keep the smallest set of tokens with this probability mass; 1 keeps all.
        min_p: Drop tokens less probable than this share of the most probable one's probability.
        min_tokens_to_keep: Number of best tokens that min_p never drops.
        xtc_probability: Chance of excluding top choices at a position.
        xtc_threshold: Probability from which a token is a top choice.
        xtc_special_tokens: Token ids that XTC never excludes.
        top_k: Keep the k most probable tokens; 0 keeps all.
        logit_bias: Added to the logits, by token id.
        repetition_penalty: Divide positive and multiply negative logits of recent tokens by this.
        repetition_context_size: Number of last tokens that are recent, prompt included.
        presence_penalty: Subtracted from the logits of tokens that occurred.
        presence_context_size: Number of last tokens looked at, prompt included. None: all generated tokens and none
            of the prompt, as in OpenAI's API.
        frequency_penalty: Subtracted from the logits of a token for each time it occurred.
        frequency_context_size: As presence_context_size.
        grammar: What the answer must match: a JSON Schema, a regular expression or a Lark grammar.
        seed: Makes sampled output repeatable, for every depth and batch.
        logprobs: Report the log-probability of every generated token.
        top_logprobs: Number of best alternatives to report beside each token.
        k: Drafts per step, or "auto": as many as pay.
        accept: Acceptance rule: "ratio" (speculative sampling), "coupled" (shared noise; the default with a seed),
            "optimistic" (accept everything: not exact), or "auto".
    """

    max_tokens: int = _number(256, 1, MAX_INT32)
    min_tokens: int = _number(0, 0, MAX_INT32)
    stop_ids: Collection[int] = ()
    stop: Collection[str] = ()

    # mlx-lm's sampler, in its order: top_p, min_p, XTC and top_k on the model's probabilities, then temperature.
    temperature: float = _number(0.0, 0, 100)
    top_n_sigma: float = _number(0.0, 0, MAX_INT32)  # llama.cpp's, before the others
    top_p: float = _number(1.0, 0, 1)
    min_p: float = _number(0.0, 0, 1)
    min_tokens_to_keep: int = _number(1, 1, MAX_INT32)
    xtc_probability: float = _number(0.0, 0, 1)
    xtc_threshold: float = _number(0.1, 0, 0.5)
    xtc_special_tokens: Collection[int] = ()
    top_k: int = _number(0, 0, MAX_INT32)

    # mlx-lm's logits processors, in its order.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = _number(1.0, 0, 100)
    repetition_context_size: int = _number(20, 1, MAX_CONTEXT_SIZE)
    presence_penalty: float = _number(0.0, -100, 100)
    presence_context_size: int | None = _number(20, 1, MAX_CONTEXT_SIZE, None)
    frequency_penalty: float = _number(0.0, -100, 100)
    frequency_context_size: int | None = _number(20, 1, MAX_CONTEXT_SIZE, None)

    grammar: GrammarSpec | None = None
    seed: int | None = _number(None, -(2**63), 2**64 - 1, None)
    logprobs: bool = False
    top_logprobs: int = _number(0, 0, MAX_TOP_LOGPROBS)

    k: int | Literal["auto"] = _number("auto", 0, MAX_K, "auto")
    accept: AcceptRule = "auto"

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.metadata:
                value = _plain(getattr(self, each.name))
                _check_number(each.name, value, **each.metadata)
                object.__setattr__(self, each.name, value)
        if not isinstance(self.logprobs, bool):
            raise RequestError(f"logprobs is {self.logprobs!r}; it must be true or false")
        if self.accept not in get_args(AcceptRule):
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
        check_type(self.grammar, (GrammarSpec, NoneType), "grammar", "make a GrammarSpec")
        self._check_lists()

    def _check_lists(self) -> None:
        if not _is_list(self.stop) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError("stop must be a list of non-empty strings")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has an entry of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed"
            )
        for name in ("stop_ids", "xtc_special_tokens"):
            if not _is_list(getattr(self, name)) or not all(map(_is_id, getattr(self, name))):
                raise RequestError(f"{name} must be a list of token ids")
        if not isinstance(self.logit_bias, Mapping) or not all(map(_is_id, self.logit_bias)):
            raise RequestError("logit_bias must map token ids to numbers")
        for name, most in (("stop", MAX_STOPS), ("stop_ids", MAX_STOPS), ("logit_bias", MAX_BIASES)):
            if (count := len(getattr(self, name))) > most:
                raise RequestError(f"{name} has {count} entries; at most {most} are allowed")
        for token, bias in self.logit_bias.items():
            if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise RequestError(f"logit_bias of token {token} is {bias!r}; it must be a number from -100 to 100")

    def check_tokens(self, vocabulary: int) -> None:
        """Raise RequestError for a bias or stop that names a token id the model does not have."""
        for name in ("logit_bias", "stop_ids", "xtc_special_tokens"):
            wrong = next((t for t in getattr(self, name) if not 0 <= t < vocabulary), None)
            if wrong is not None:
                raise RequestError(f"{name} names the token id {wrong}: ids go from 0 to {vocabulary - 1}")

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    @property
    def rule(self) -> Literal["ratio", "coupled", "optimistic"]:
        """Return the acceptance rule. Greedy is the coupled rule without noise: accept the target's own argmax."""
        if self.accept == "auto":
            return "ratio" if self.sampled and self.seed is None else "coupled"
        return "coupled" if self.accept == "ratio" and not self.sampled else self.accept

    @property
    def context_size(self) -> int:
        """Return how many of the last tokens the penalties need; 0 without penalties."""
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
        """Return whether a penalty needs the counts of all generated tokens."""
        presence = self.presence_penalty != 0 and self.presence_context_size is None
        return presence or (self.frequency_penalty != 0 and self.frequency_context_size is None)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))
