"""Constrained decoding: which tokens a grammar permits next. llguidance decides on the host; the device sees masks.

What a matcher permits depends only on the tokens its sequence has generated, so it may look ahead through drafts and
roll back: a constrained answer is the same for every k.
"""

import time
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

A = TypeVar("A")
T = TypeVar("T")

CACHED_GRAMMARS = 64  # compiled grammars to keep per tokenizer
# Between the parts of JSON: a space, or a line break with its indentation. A model under a grammar is prone to answer
# with nothing but white space where it may.
JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,32}"}
# llguidance's defaults, but for the states of a lexer, which take 1 to 2 kB each.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
MASK_SECONDS = 1.0  # CPU time for one mask. Ordinary masks take milliseconds, and the whole batch waits for each.


class Matcher:
    """Follows one sequence through its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, stop_ids: Collection[int], vocabulary: int):
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._mask_bytes = (vocabulary + 7) // 8
        self.stopped = False  # the grammar is complete, and nothing can follow
        self.failed: HeadstartError | None = None

    def forced(self, most: int) -> list[int]:
        """Return the next tokens, at most `most`, that the grammar leaves no choice about."""
        tokens = self._matcher.compute_ff_tokens()[:most]
        end = next((i for i, token in enumerate(tokens) if token in self._stop_ids), None)
        return tokens[:end]

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Return the permitted tokens before each draft and after the last, as bit masks over the vocabulary.

        Masks end at a draft that is forbidden or ends the answer, and where no token is permitted.
        """
        masks, consumed = [self._mask()], 0
        for draft in drafts:
            if draft in self._stop_ids or not self._matcher.try_consume_tokens([draft]):
                break
            masks.append(self._mask())
            consumed += 1
        if not self._matcher.rollback(consumed):
            raise self._error()
        return masks if masks[-1].strip(b"\0") else masks[:-1]

    def advance(self, tokens: Sequence[int]) -> int:
        """Consume generated tokens and return how many are part of the answer.

        Tokens after the one that completes the grammar are not, nor those from one that breaks it on. A token breaks
        it only if no token was permitted; then `failed` says why.
        """
        for index, token in enumerate(tokens):
            if token not in self._stop_ids and self._matcher.consume_token(token) and not self._matcher.is_stopped():
                continue
            if self._matcher.is_accepting():
                self.stopped = True
                return index + 1
            self.failed = self._error()
            return index
        return len(tokens)

    def _mask(self) -> bytes:
        start = time.thread_time()
        mask = bytearray(self._matcher.compute_bitmask()[: self._mask_bytes])
        if time.thread_time() - start > MASK_SECONDS:
            raise HeadstartError(f"grammar: finding the next tokens took more than {MASK_SECONDS:g} s: simplify it")
        if self._matcher.is_error():
            raise self._error()
        mask += bytes(self._mask_bytes - len(mask))  # a model may have more ids than its tokenizer: they have no text
        may_end = self._matcher.is_accepting()
        if not may_end and len(mask) - mask.count(0) == 1:
            self._permit_text(mask)
        for token in self._stop_ids:
            bit = 1 << token % 8
            mask[token // 8] = mask[token // 8] | bit if may_end else mask[token // 8] & ~bit
        return bytes(mask)

    def _permit_text(self, mask: bytearray) -> None:
        """Permit the first token of a text that the grammar forces and that is also the text of an added token.

        llguidance tokenises such a text as the added token, permits that alone, and then refuses it.
        """
        last = len(mask.rstrip(b"\0")) - 1
        token = 8 * last + mask[last].bit_length() - 1
        if self._tokenizer.is_special_token(token) and not self._matcher.validate_tokens([token]):
            first = self._tokenizer.greedy_tokenize(self._tokenizer.decode_str([token]))[0]
            mask[last] = 0
            mask[first // 8] |= 1 << first % 8

    def _error(self) -> HeadstartError:
        reason = self._matcher.get_error() or self._matcher.stop_reason()
        return HeadstartError(f"grammar: no token can follow the generated text: {_brief(reason)}")


@dataclass(frozen=True)
class Grammar:
    """A grammar compiled for a tokenizer."""

    start: LLMatcher
    tokenizer: LLTokenizer

    def matcher(self, stop_ids: Collection[int], vocabulary: int) -> Matcher:
        """Return a matcher for a new sequence of a model with `vocabulary` token ids."""
        known = [token for token in stop_ids if token < vocabulary]
        return Matcher(self.start.deep_copy(), self.tokenizer, known, vocabulary)


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
            if grammar is not None:
                self._cache(spec, grammar)
        return grammar

    def compile(self, spec: GrammarSpec) -> Grammar:
        grammar = self.find(spec)
        if grammar is None:
            check_bounds(spec.kind, spec.source)
            grammar = Grammar(on_deep_stack(self._compile, spec), self.tokenizer)  # may take a second: hold no lock
            with self._lock:
                self._cache(spec, grammar)
        return grammar

    def _cache(self, spec: GrammarSpec, grammar: Grammar) -> None:
        self._in_use[spec] = self._recent[spec] = grammar
        self._recent.move_to_end(spec)
        if len(self._recent) > CACHED_GRAMMARS:
            self._recent.popitem(last=False)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        source = llguidance_grammar(spec)
        start = LLMatcher(self.tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
        permitted = b"" if start.is_error() else start.compute_bitmask()
        if start.is_error():
            raise RequestError(f"grammar is not a usable {spec.kind}: {_brief(start.get_error())}")
        stop_ids = sum(1 << token for token in self.tokenizer.eos_tokens)
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
        return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS if has_options else None)
    except ValueError as error:
        raise RequestError(f"grammar is not a usable {spec.kind}: {error}") from error


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


def _brief(reason: str) -> str:
    """Return llguidance's message without its placeholder for internal state."""
    return reason.replace("<non-verbose/>", "").strip()
