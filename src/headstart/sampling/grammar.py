"""Constrained decoding: which tokens a grammar permits next. llguidance decides on the host; the device sees masks.

What a matcher permits depends only on the tokens its sequence has generated, so it may look ahead through drafts and
roll back: a constrained answer is the same for every k. Where a grammar cannot roll back, a copy of its matcher looks
ahead.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import mlx.core as mx
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import HeadstartError, RequestError
from ..sampling_params import GrammarSpec
from .bounds import check_bounds, on_deep_stack
from .matcher import Matcher, brief, meets_limit

_QUOTED = re.compile(r'"([^"]{1,100})"')
A = TypeVar("A")
T = TypeVar("T")

TOKEN_IDS = re.compile(r"<\[([\d\s,-]+)\]>")  # in Lark's form
CACHED_GRAMMARS = 64  # compiled grammars to keep per tokenizer
# Between the parts of JSON: a space, or a line break with its indentation. A model under a grammar is prone to answer
# with nothing but white space where it may.
JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,32}"}
LENIENT: Any = {"lenient": True, "coerce_one_of": True}  # with what cannot be held left out, and said in warnings
# llguidance's defaults, but for the states of a lexer, which take 1 to 2 kB each.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}


class Grammar:
    """A grammar compiled for a tokenizer.

    The matchers of its sequences share a lexer, which llguidance builds while it is used. Once that lexer has met a
    limit it is of no use to any of them, so the grammar is `spoiled`: the next request compiles it again.
    """

    def __init__(self, spec: GrammarSpec, tokenizer: LLTokenizer):
        self.spec = spec
        self.tokenizer = tokenizer
        self.start = _compile(spec, tokenizer)
        self.left_out = _left_out(self.start.get_grammar_warnings())  # keywords of its schemas
        self.spoiled = False
        self.rolls_back = False  # until that is known
        self.rolls_back = self._rolls_back()

    def matcher(self, stop_ids: Collection[int], vocabulary: int) -> Matcher:
        """Return a matcher for a new sequence of a model with `vocabulary` token ids."""
        known = [token for token in stop_ids if token < vocabulary]
        return Matcher(self, known, vocabulary)

    def renew(self) -> LLMatcher:
        """Return the start of the grammar with a new lexer, for a sequence whose lexer has met a limit."""
        self.spoiled = True
        return on_deep_stack(_compile, self.spec, self.tokenizer)

    def _rolls_back(self) -> bool:
        """Return whether tokens can be taken back. llguidance refuses that with `max_tokens=` and `stop=`, and does
        it wrongly where a grammar names an ordinary token by its id."""
        ends = self.tokenizer.eos_tokens
        permitted = int.from_bytes(self.matcher(ends, self.tokenizer.vocab_size).masks([])[0], "little")
        probe = self.start.deep_copy()
        if not probe.consume_token((permitted & -permitted).bit_length() - 1) and meets_limit(probe.get_error()):
            reason = brief(probe.get_error())
            raise RequestError(f"grammar is a {self.spec.kind} that meets a limit of the grammar library: {reason}")
        ids = " ".join(TOKEN_IDS.findall(self.spec.source) if self.spec.kind == "lark" else ())
        return probe.rollback(1) and all(self.tokenizer.is_special_token(int(id)) for id in re.findall(r"\d+", ids))


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and caches them."""

    def __init__(self, tokenizer: TokenizerWrapper):
        self.tokenizer: LLTokenizer = from_tokenizer(tokenizer._tokenizer, eos_token=sorted(tokenizer.eos_token_ids))
        self._lock = Lock()
        self._in_use: WeakValueDictionary[GrammarSpec, Grammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSpec, Grammar] = OrderedDict()  # least recently used first

    def find(self, spec: GrammarSpec) -> Grammar | None:
        """Return the grammar if it is cached."""
        with self._lock:
            grammar = self._in_use.get(spec)
            if grammar is None or grammar.spoiled:
                return None
            self._cache(spec, grammar)
        return grammar

    def compile(self, spec: GrammarSpec) -> Grammar:
        grammar = self.find(spec)
        if grammar is None:
            check_bounds(spec.kind, spec.source)
            grammar = on_deep_stack(Grammar, spec, self.tokenizer)  # may take a second: hold no lock
            with self._lock:
                self._cache(spec, grammar)
        return grammar

    def _cache(self, spec: GrammarSpec, grammar: Grammar) -> None:
        self._in_use[spec] = self._recent[spec] = grammar
        self._recent.move_to_end(spec)
        if len(self._recent) > CACHED_GRAMMARS:
            self._recent.popitem(last=False)


def _compile(spec: GrammarSpec, tokenizer: LLTokenizer) -> LLMatcher:
    source = llguidance_grammar(spec)
    start = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
    permitted = b"" if start.is_error() else start.compute_bitmask()
    if start.is_error():
        raise RequestError(f"grammar is not a usable {spec.kind}: {brief(start.get_error())}")
    stop_ids = sum(1 << token for token in tokenizer.eos_tokens)
    if not int.from_bytes(permitted, "little") & ~stop_ids:
        raise RequestError(f"grammar is a {spec.kind} that permits only an empty answer")
    return start


_compilers: "WeakKeyDictionary[TokenizerWrapper, GrammarCompiler]" = WeakKeyDictionary()
_lock = Lock()


def llguidance_grammar(spec: GrammarSpec) -> str:
    """Return a grammar in the form that llguidance takes. Raises RequestError if it cannot be used."""
    try:
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.source)
        if spec.kind == "lark":
            return LLMatcher.grammar_from_lark(spec.source)
        schema = spec.source if spec.kind == "json_schema" else '{"type":"object"}'
        has_options = schema.lstrip().startswith("{")  # `true` is a schema too
        return LLMatcher.grammar_from_json_schema(schema, defaults=json_options(spec) if has_options else None)
    except ValueError as error:
        raise RequestError(f"grammar is not a usable {spec.kind}: {error}") from error


def json_options(spec: GrammarSpec) -> Any:
    """Return how llguidance takes the schema of a grammar."""
    return JSON_OPTIONS if spec.strict else JSON_OPTIONS | LENIENT


def _left_out(warnings: Sequence[str]) -> list[str]:
    """Return the keywords of a schema that llguidance warns are left out, each once."""
    found: dict[str, None] = {}
    for warning in warnings:
        kind, _, rest = warning.removesuffix(" times)").partition(": ")
        match kind:
            case "Unimplemented keys":
                found |= dict.fromkeys(_QUOTED.findall(rest))
            case "Unknown format":
                found[f"format {rest.partition(' (')[0]}"[:100]] = None
            case _:
                found["oneOf" if kind.startswith("oneOf") else warning[:100]] = None
    return list(found)


def compile_grammar(spec: GrammarSpec, tokenizer: TokenizerWrapper) -> Grammar:
    """Return the compiled grammar, from the cache if it is there. Raises RequestError with llguidance's reason."""
    return _compiler(tokenizer).compile(spec)


def find_grammar(spec: GrammarSpec, tokenizer: TokenizerWrapper) -> Grammar | None:
    """Return the grammar if it has been compiled for this tokenizer and is still in use or was used recently."""
    with _lock:
        compiler = _compilers.get(tokenizer)
    return compiler.find(spec) if compiler is not None else None


def token_bytes(token: int, tokenizer: TokenizerWrapper) -> bytes:
    """Return the bytes of a token, which may be part of a character; empty for a token without text."""
    decoder = _compiler(tokenizer).tokenizer
    return decoder.decode_bytes([token]) if token < decoder.vocab_size else b""


def _compiler(tokenizer: TokenizerWrapper) -> GrammarCompiler:
    with _lock:
        if tokenizer not in _compilers:
            try:
                _compilers[tokenizer] = GrammarCompiler(tokenizer)
            except ValueError as error:
                raise RequestError(f"grammar cannot be used with this model's tokenizer: {error}") from error
        return _compilers[tokenizer]


@dataclass(frozen=True)
class GrammarMasks:
    """The grammars of a batch in one step."""

    matchers: Sequence[Matcher | None]  # one per sequence, None without a grammar
    vocabulary: int

    def forced(self, k: int) -> mx.array | None:
        """Return the tokens [B, k] that grammars leave no choice about, then -1; None if there are none."""
        forced = [_guarded(matcher, Matcher.forced, k) for matcher in self.matchers]
        if not any(forced):
            return None
        return mx.array([tokens + [-1] * (k - len(tokens)) for tokens in forced], mx.int32)

    def permitted(self, drafts: mx.array) -> mx.array:
        """Return the tokens permitted in each window, [B, k+1, V]. The host waits for the drafts [B, k]."""
        width = drafts.shape[1] + 1
        windows: list[list[int]] = drafts.tolist()  # type: ignore[assignment]
        masks = [b"\xff" * ((self.vocabulary + 7) // 8)]  # mask 0 permits everything
        index = []  # [B, k+1], into `masks`
        for matcher, window in zip(self.matchers, windows, strict=True):
            new = _guarded(matcher, Matcher.masks, window)
            index.append([*range(len(masks), len(masks) + len(new)), *[0] * (width - len(new))])
            masks += new
        packed = mx.array(memoryview(b"".join(masks)))  # type: ignore[arg-type]  # it takes any buffer
        bits = packed.reshape(len(masks), -1)[mx.array(index)]  # [B, k+1, V/8] uint8, the lowest bit first
        each = bits[..., None] & mx.array([1 << i for i in range(8)], mx.uint8)
        return (each != 0).flatten(-2)[..., : self.vocabulary]


def _guarded(matcher: Matcher | None, method: Callable[[Matcher, A], list[T]], argument: A) -> list[T]:
    """Call a matcher's method. One that fails ends its own sequence and no other: the result is then empty."""
    if matcher is None or matcher.failed is not None:
        return []
    try:
        return method(matcher, argument)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of llguidance's is no Exception
        matcher.failed = error if isinstance(error, HeadstartError) else HeadstartError(f"grammar: {error}")
        return []
