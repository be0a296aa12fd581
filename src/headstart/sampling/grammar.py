"""What a grammar lets a row say next. llguidance decides on the host; the device only sees masks.

What a matcher permits depends on the tokens that its row has said and on nothing else, so it may look ahead
through drafts and come back: a constrained answer is the same for every k.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import HeadstartError, RequestError
from .bounds import check_bounds, on_deep_stack

A = TypeVar("A")
T = TypeVar("T")

MOST_KEPT = 64  # compiled grammars a tokenizer
# Between the parts of JSON: a space, or a line break with its indentation. A model under a grammar is prone to answer
# with nothing but white space where it may.
JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,32}"}
# llguidance's defaults, but for the states of a lexer, which take 1 to 2 kB each.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
MASK_SECONDS = 1.0  # of CPU time. Ordinary masks take milliseconds, and every sequence of the batch waits for each.


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as a request states it."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    source: str = ""  # a JSON Schema, a regular expression or a Lark grammar

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "json_object", "regex", "lark"):
            raise RequestError(
                f"grammar has the kind {self.kind!r}; it must be json_schema, json_object, regex or lark"
            )
        if not isinstance(self.source, str):
            raise RequestError(f"grammar has a source of type {type(self.source).__name__}; it must be text")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "GrammarSpec":
        """From a schema or its text. The order of its properties stays: it is the order of the answer's."""
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            return cls("json_schema", json.dumps(parsed, ensure_ascii=False, separators=(",", ":"), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RequestError(f"grammar is no JSON Schema: {error}") from error

    def for_llguidance(self) -> str:
        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.source)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.source)
        schema = self.source if self.kind == "json_schema" else '{"type":"object"}'
        options = (
            JSON_OPTIONS if schema.lstrip().startswith("{") else None
        )  # true is a schema too, but has no options
        return LLMatcher.grammar_from_json_schema(schema, defaults=options)


class Matcher:
    """Follows one row through its grammar."""

    def __init__(self, matcher: LLMatcher, ends: Collection[int], vocabulary: int):
        self._matcher = matcher
        self._ends = frozenset(ends)
        self._size = (vocabulary + 7) // 8  # bytes of a mask
        self.stopped = False  # the grammar is complete, and nothing can follow
        self.failed: HeadstartError | None = None

    def forced(self, most: int) -> list[int]:
        """The tokens that must come next whatever the model thinks, at most so many."""
        tokens = self._matcher.compute_ff_tokens()[:most]
        end = next((i for i, token in enumerate(tokens) if token in self._ends), None)
        return tokens[:end]

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """A bit for every token of the model, before each draft and after the last. Behind a draft that is forbidden
        or ends the answer, and where no token is permitted, nothing can be said, and the masks are left out."""
        masks, consumed = [self._mask()], 0
        for draft in drafts:
            if draft in self._ends or not self._matcher.try_consume_tokens([draft]):
                break
            masks.append(self._mask())
            consumed += 1
        if not self._matcher.rollback(consumed):
            raise self._error()
        return masks if masks[-1].strip(b"\0") else masks[:-1]

    def advance(self, tokens: Sequence[int]) -> int:
        """Take in what the row said → how many of the tokens count: none behind the one that completes the grammar,
        none from one that breaks it. One does where no token was permitted: then the row has failed."""
        for index, token in enumerate(tokens):
            if token not in self._ends and self._matcher.consume_token(token) and not self._matcher.is_stopped():
                continue
            if self._matcher.is_accepting():
                self.stopped = True
                return index + 1
            self.failed = self._error()
            return index
        return len(tokens)

    def _mask(self) -> bytes:
        begun = time.thread_time()
        mask = bytearray(self._matcher.compute_bitmask()[: self._size])
        if time.thread_time() - begun > MASK_SECONDS:
            raise HeadstartError(f"grammar: finding the next tokens took more than {MASK_SECONDS:g} s: simplify it")
        if self._matcher.is_error():
            raise self._error()
        mask += bytes(self._size - len(mask))  # a model may know more ids than its tokenizer: none of them is text
        may_end = self._matcher.is_accepting()
        for token in self._ends:
            bit = 1 << token % 8
            mask[token // 8] = mask[token // 8] | bit if may_end else mask[token // 8] & ~bit
        return bytes(mask)

    def _error(self) -> HeadstartError:
        reason = self._matcher.get_error() or self._matcher.stop_reason()
        return HeadstartError(f"grammar: no token can follow what was said: {_brief(reason)}")


@dataclass(frozen=True)
class Grammar:
    """A grammar that has been compiled for a tokenizer."""

    start: LLMatcher

    def matcher(self, ends: Collection[int], vocabulary: int) -> Matcher:
        """For a new row: `ends` are the tokens that end its answer, `vocabulary` the number of ids of its model."""
        return Matcher(self.start.deep_copy(), [token for token in ends if token < vocabulary], vocabulary)


class Compiler:
    """A tokenizer as llguidance needs it, and the grammars last compiled for it."""

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer: LLTokenizer = from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
        self._lock = Lock()
        # All that somebody holds, and the least recently used last ones, which are held here.
        self._grammars: WeakValueDictionary[GrammarSpec, Grammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSpec, Grammar] = OrderedDict()

    def find(self, spec: GrammarSpec) -> "Grammar | None":
        """Return the grammar if it has been compiled, and keep it for longer."""
        with self._lock:
            grammar = self._grammars.get(spec)
            if grammar is not None:
                self._keep(spec, grammar)
        return grammar

    def compile(self, spec: GrammarSpec) -> Grammar:
        grammar = self.find(spec)
        if grammar is None:
            check_bounds(spec.kind, spec.source)
            grammar = Grammar(on_deep_stack(self._start, spec))  # may take a second: nobody else waits for it
            with self._lock:
                self._keep(spec, grammar)
        return grammar

    def spell(self, token: int) -> bytes:
        return self._tokenizer.decode_bytes([token]) if token < self._tokenizer.vocab_size else b""

    def _keep(self, spec: GrammarSpec, grammar: Grammar) -> None:
        self._grammars[spec] = self._recent[spec] = grammar
        self._recent.move_to_end(spec)
        if len(self._recent) > MOST_KEPT:
            self._recent.popitem(last=False)

    def _start(self, spec: GrammarSpec) -> LLMatcher:
        try:
            start = LLMatcher(self._tokenizer, spec.for_llguidance(), log_level=0, limits=LLParserLimits(**LIMITS))
        except ValueError as error:
            raise RequestError(f"grammar is no {spec.kind} that can be used: {error}") from error
        permitted = b"" if start.is_error() else start.compute_bitmask()
        if start.is_error():
            raise RequestError(f"grammar is no {spec.kind} that can be used: {_brief(start.get_error())}")
        ends = sum(1 << token for token in self._tokenizer.eos_tokens)
        if not int.from_bytes(permitted, "little") & ~ends:
            raise RequestError(f"grammar is a {spec.kind} that permits nothing but an empty answer")
        return start


_compilers: "WeakKeyDictionary[TokenizerWrapper, Compiler]" = WeakKeyDictionary()
_lock = Lock()


def compile_grammar(spec: GrammarSpec, tokenizer: TokenizerWrapper) -> Grammar:
    """Compiled now or remembered. Raises RequestError with llguidance's reason where the grammar is not one."""
    return _compiler(tokenizer).compile(spec)


def find_grammar(spec: GrammarSpec, tokenizer: TokenizerWrapper) -> Grammar | None:
    """Return the grammar if it has been compiled for this tokenizer. It can be found for as long as it is held."""
    with _lock:
        compiler = _compilers.get(tokenizer)
    return compiler.find(spec) if compiler is not None else None


def spell(token: int, tokenizer: TokenizerWrapper) -> bytes:
    """A token's own bytes, which may be part of a character; none where it has no text."""
    return _compiler(tokenizer).spell(token)


def _compiler(tokenizer: TokenizerWrapper) -> Compiler:
    with _lock:
        if tokenizer not in _compilers:
            try:
                _compilers[tokenizer] = Compiler(tokenizer)
            except ValueError as error:
                raise RequestError(f"grammar cannot be used with this model's tokenizer: {error}") from error
        return _compilers[tokenizer]


@dataclass(frozen=True)
class GrammarMasks:
    """The grammars of a batch in one step."""

    matchers: Sequence[Matcher | None]  # of each row, None for one that may say anything
    vocabulary: int

    def forced(self, k: int) -> mx.array | None:
        """[B, k]: the tokens that must come next in each row, then -1. None where no row has any."""
        rows = [_ask(matcher, Matcher.forced, k) for matcher in self.matchers]
        if not any(rows):
            return None
        return mx.array([row + [-1] * (k - len(row)) for row in rows], mx.int32)

    def permitted(self, drafts: mx.array) -> mx.array:
        """Given the drafts [B, k], which the host waits for: the tokens permitted in each window, [B, k+1, V]."""
        width = drafts.shape[1] + 1
        windows: list[list[int]] = drafts.tolist()  # type: ignore[assignment]
        masks = [b"\xff" * ((self.vocabulary + 7) // 8)]  # the first permits everything
        index = []  # [B, k+1]: which of the masks
        for matcher, window in zip(self.matchers, windows, strict=True):
            mine = _ask(matcher, Matcher.masks, window)
            index.append([*range(len(masks), len(masks) + len(mine)), *[0] * (width - len(mine))])
            masks += mine
        packed = mx.array(memoryview(b"".join(masks)))  # type: ignore[arg-type]  # it takes any buffer
        packed = packed.reshape(len(masks), -1)
        return unpack(packed[mx.array(index)], self.vocabulary)


def _ask(matcher: Matcher | None, question: Callable[[Matcher, A], list[T]], given: A) -> list[T]:
    """Nothing for a row without a grammar, and for one whose matcher fails: that row ends, the others go on."""
    if matcher is None or matcher.failed is not None:
        return []
    try:
        return question(matcher, given)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of llguidance's is no Exception
        matcher.failed = error if isinstance(error, HeadstartError) else HeadstartError(f"grammar: {error}")
        return []


def unpack(bits: mx.array, count: int) -> mx.array:
    """[…, bytes] uint8, the lowest bit first → […, count] bool."""
    each = bits[..., None] & mx.array([1 << i for i in range(8)], mx.uint8)
    return (each != 0).flatten(-2)[..., :count]


def _brief(reason: str) -> str:
    """llguidance's messages without the marks it leaves in place of its inner state."""
    return reason.replace("<non-verbose/>", "").strip()
