"""What worker processes do: tokenise long texts, decode images and try grammars, where a crash does no harm.

Run as a script: it imports nothing of Headstart but `images.py`, by its path, and starts fast. Requests arrive on
standard input and answers leave on standard output, each one line of JSON and `bytes` of data; the first has the
settings. The process ends when its input does, also in the middle of a request.

A tokenizer turns the text of an added token (`<|im_end|>`, `<think>`, …) into that token wherever it occurs, so users
and tools could end a turn and begin another. Here a mark breaks every such text in the strings of a conversation
before the template is rendered, also where it would arise only next to what the template writes. The rendered text is
split at the added tokens that are left, which are the template's; what is between them is encoded without added
tokens and marks. A conversation that needs no mark is encoded in one call, as it is.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from runpy import run_path
from secrets import randbelow
from typing import Any, BinaryIO, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

MEMORY = 2 * 2**30  # bytes beyond what the tokenizer takes
PIECE = 2**16  # characters of a text that is counted in pieces
TRIAL_TOKENS = 64  # that a grammar is followed for, at most
TRIAL_SECONDS = 0.25  # of CPU time for that
UNFIT = "doesn't satisfy the grammar"  # said of the text of an added token, which llguidance permits and then refuses
NICENESS = 5  # the server's own threads come first
# What templates look up or compare: it may be part of an added token, and is not marked as such.
KEYWORDS = frozenset({
    "role", "content", "reasoning_content", "tool_calls", "tool_call_id", "id", "type", "function", "name",
    "description", "arguments", "parameters", "properties", "required", "items", "enum", "anyOf", "oneOf", "allOf",
    "default", "title", "format", "const",
})  # fmt: skip

Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]
Render = Callable[..., str]  # (messages, tools, options) -> the text of the prompt
MarkedText = tuple[str, str]  # a text, and the mark that breaks what must not become a control token; "" for none
# chat: rendered, as `render` returned it with its mark; text: added tokens in it are parsed; literal: they are not.
Kind = Literal["chat", "text", "literal"]
Json = dict[str, Any]
Requests = queue.SimpleQueue[tuple[Json, bytes]]


class TokenBreaker:
    """Mark strings so that no added token is found in them, nor arises from them and the text around them."""

    def __init__(self, tokens: Collection[str], normalize: Callable[[str], str] | None):
        """`normalize`: of the tokenizer, if it looks for added tokens in normalised text."""
        normalized = [normalize(token) for token in tokens] if normalize is not None else []
        texts = sorted({*tokens, *normalized}, key=len, reverse=True)
        cuts = [(text, i) for text in texts for i in range(1, len(text))]
        spans = [(text, i, j) for text, i in cuts for j in range(i + 1, len(text))]
        self._normalize = normalize
        self._texts = texts
        self._prefixes = {text[:i] for text, i in cuts}
        self._suffixes = {text[i:] for text, i in cuts}
        # What a template may put between brackets: `'<' ~ key ~ '>'`
        self._middles = {text[i:j] for text, i, j in spans if not any(map(str.isalnum, text[:i] + text[j:]))}
        self._ends = {end for text in texts for end in (text[0], text[-1])}  # most strings have none of these
        self._longest = max(map(len, texts), default=0)

    def mark(self, text: str, mark: str, *, middles: bool = True) -> str:
        """Return `text` with `mark` at every place where it must be broken."""
        if self._normalize is None and text not in self._middles and not any(end in text for end in self._ends):
            return text
        places = sorted(self._places(text, middles=middles))
        ends = [*places, len(text)]
        text = mark.join(text[start:end] for start, end in zip([0, *places], ends, strict=True))
        # Plain replacements: one pattern of all tokens would block every thread while it searches megabytes.
        for token in self._texts:
            while token in text:  # again where it overlaps itself
                text = text.replace(token, token[0] + mark + token[1:])
        return text

    def mark_all(self, value: Any, mark: str, *, middles: bool = True) -> Any:
        """Return a copy of a JSON value with all of its strings marked, keys too."""
        match value:
            case str():
                return self.mark(value, mark, middles=middles)
            case list() | tuple():
                return [self.mark_all(each, mark, middles=middles) for each in value]
            case dict():
                marked = {}
                for key, each in value.items():
                    marked_key = self.mark(key, mark, middles=middles and key not in KEYWORDS)
                    marked[marked_key] = self.mark_all(each, mark, middles=middles and key not in ("role", "type"))
                return marked
        return value

    def _places(self, text: str, *, middles: bool) -> set[int]:
        """Return where `text` must be broken besides in the added tokens that it holds."""
        places: set[int] = set()
        if self._normalize is not None and any(
            token in self._normalize(text) and token not in text for token in self._texts
        ):
            places = set(range(1, len(text)))  # it arises from other characters, at places that are not known
        # What the template, or another string, puts before or after may complete a token.
        lengths = range(1, min(len(text), self._longest) + 1)
        places |= {length - 1 for length in lengths if text[:length] in self._suffixes}
        places |= {len(text) - length + 1 for length in lengths if text[-length:] in self._prefixes}
        if middles and text in self._middles:
            places.add(len(text) - 1)
        return places


class Encoder:
    """A tokenizer that can tell the template's added tokens from the user's text."""

    def __init__(self, tokenizer: Tokenizer):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        # Runs of spaces and single characters are spelling. They control nothing, and models expect them in text.
        controls = {id: each.content for id, each in added.items() if len(each.content) > 1 and each.content.strip()}
        normalizer = tokenizer.normalizer if any(each.normalized for each in added.values()) else None
        self._tokenizer = tokenizer
        self._breaker = TokenBreaker(controls.values(), normalizer.normalize_str if normalizer is not None else None)
        self._controls = frozenset(controls)
        self._bare = _without_added(tokenizer)
        # Finds added tokens and does nothing else. Its ids of them are mapped to the tokenizer's.
        self._splitter = Tokenizer(WordLevel({"\0": 0}, unk_token="\0"))
        self._splitter.add_tokens(list(added.values()))
        if normalizer is not None:
            self._splitter.normalizer = normalizer
        found = {self._splitter.token_to_id(token.content): id for id, token in added.items()}
        self._ids = {split_id: id for split_id, id in found.items() if split_id is not None}

    def render(self, render: Render, conversation: Conversation) -> MarkedText:
        """Return the text of a prompt and the mark in it, which is empty if no string needed one."""
        text = render(*conversation)
        messages, tools, options = conversation
        mark = _new_mark()
        marked = (
            self._breaker.mark_all(messages, mark),
            self._breaker.mark_all(tools, mark),
            {name: self._breaker.mark_all(value, mark, middles=False) for name, value in options.items()},
        )
        if marked == (list(messages), tools, options):
            return text, ""
        return render(*marked), mark

    def tokens(self, text: str, kind: Kind, mark: str = "") -> list[int]:
        """Return the tokens of a text of any kind."""
        match kind:
            case "chat":
                return self._encode_chat(text, mark)
            case "text":
                return _ids(self._tokenizer, text, framed=True)
            case "literal":
                return self._encode_literal(text)

    def _encode_chat(self, text: str, mark: str) -> list[int]:
        """Return the tokens of a text. Whatever `mark` breaks is text; the mark itself is removed."""
        plain = text.replace(mark, "") if mark else text
        segments = self._segments(text) if mark else []
        if not mark or self._segments(plain) == [(piece.replace(mark, ""), token) for piece, token in segments]:
            return _ids(self._tokenizer, plain)
        ids: list[int] = []
        for piece, token in segments:
            ids += self._encode_piece(piece.split(mark)) if token is None else [token]
        return ids

    def _encode_literal(self, text: str) -> list[int]:
        """Return the tokens of a text in which nothing is a control token, framed as the tokenizer frames texts."""
        mark = _new_mark()
        one, framed = _ids(self._bare, "a"), self._bare.encode("a").ids
        at = framed.index(one[0])
        return [*framed[:at], *self._encode_chat(self._breaker.mark(text, mark), mark), *framed[at + len(one) :]]

    def _encode_piece(self, parts: Sequence[str]) -> list[int]:
        """Return the tokens of text between added tokens. `parts`: the text, split where it must stay broken."""
        ids = _ids(self._bare, "".join(parts))
        if self._controls.isdisjoint(ids):
            return ids
        # The model's own vocabulary has an added token's text: do not let it form across the breaks.
        return [id for part in parts for id in _ids(self._bare, part)]

    def _segments(self, text: str) -> list[tuple[str, int | None]]:
        """Return the added tokens in a text, each with its id, and what is between them."""
        segments: list[tuple[str, int | None]] = []
        encoding, end = self._splitter.encode(text, add_special_tokens=False), 0
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._ids:
                segments += [(text[end:start], None)] if end < start else []
                segments.append((text[start:stop], self._ids[token]))
                end = stop
        return segments + ([(text[end:], None)] if end < len(text) else [])


def _ids(tokenizer: Tokenizer, text: str, *, framed: bool = False) -> list[int]:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=framed)  # without offsets: a quarter faster
    return list(encoding.ids)


def _without_added(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the same model, which is shared, and no added tokens."""
    bare = Tokenizer(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(bare, name, part)
    return bare


def _new_mark() -> str:
    """Return a text that no prompt holds, survives JSON, HTML and changes of case, and cannot overlap itself."""
    return f"~{randbelow(10**36)}^"


def run_worker() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    os.nice(NICENESS)
    settings, requests = json.loads(receive(sys.stdin.buffer.readline())[1]), Requests()
    threading.stack_size(settings["stack"])
    threading.Thread(target=answer_requests, args=(settings, requests, answers), daemon=True).start()
    try:
        for line in sys.stdin.buffer:
            requests.put(receive(line))
    finally:
        os._exit(0)  # without waiting for the request in progress


def receive(line: bytes) -> tuple[Json, bytes]:
    request = json.loads(line)
    return request, sys.stdin.buffer.read(request.pop("bytes"))


def answer_requests(settings: Json, requests: Requests, answers: BinaryIO) -> None:
    """Answer one request after another; an unexpected error ends the process."""
    try:
        encoder = Encoder(Tokenizer.from_str(settings["tokenizer"]))
        grammar_tokenizer = LLTokenizer(settings["tokenizer"], eos_token=settings["eos"])
        limit_memory()
        answer, found = Json(), b""  # ready
        while True:
            answers.write(json.dumps({**answer, "bytes": len(found)}).encode() + b"\n" + found)
            answers.flush()
            signal.setitimer(signal.ITIMER_PROF, 0)
            request, data = requests.get()
            if "rules" in request:
                answer, found = decode_image(data, **request)
            elif "gbnf" in request:
                signal.setitimer(signal.ITIMER_PROF, request["seconds"])
                try:
                    answer, found = {"lark": gbnf_to_lark(request["gbnf"])}, b""
                except Exception as error:
                    answer, found = {"error": str(error)[:500]}, b""
            elif "kind" in request:
                answer, found = encode(encoder, data.decode(), **request)
            else:
                answer, found = try_grammar(grammar_tokenizer, **request), b""
    finally:
        os._exit(1)


def encode(encoder: Encoder, text: str, kind: Kind, mark: str, limit: int | None) -> tuple[Json, bytes]:
    """Return the tokens of a text as integers of 32 bits, or that there are more than `limit` of them.

    A text that is probably too long is first counted in pieces: off by a few tokens at their ends.
    """
    try:
        if limit is not None and len(text) > 4 * limit:
            count = 0
            for start in range(0, len(text), PIECE):
                count += len(encoder.tokens(text[start : start + PIECE], kind, mark))
                if count > limit + limit // 16 + 64:
                    return {"more_than": limit}, b""
        return {}, array("I", encoder.tokens(text, kind, mark)).tobytes()
    except BaseException as error:  # a panic of the tokenizer is not an Exception
        return {"error": str(error)[:500]}, b""


def decode_image(image: bytes, seconds: float, **request: Any) -> tuple[Json, bytes]:
    """Return the pixels of a file, resized, or what is wrong with it, within `seconds` of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    return load_images()["decode"](image, **request)


@cache
def load_images() -> Json:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would reserve more memory than the limit
    return run_path(str(Path(__file__).parents[1] / "images.py"))


def try_grammar(tokenizer: Any, grammar: str, limits: Json, seconds: float, mask_seconds: float) -> Json:
    """Compile a grammar and follow it for some tokens. Return an error if it cannot be followed, or nothing.

    Errors in the grammar itself are left to the compiler in the server. SIGPROF kills the process after `seconds` of
    CPU time: a busy machine does not count against the grammar.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
    end = time.thread_time() + TRIAL_SECONDS
    random = 1
    for step in range(TRIAL_TOKENS):
        start = time.thread_time()
        mask = int.from_bytes(b"" if matcher.is_error() else matcher.compute_bitmask(), "little")
        if time.thread_time() - start > mask_seconds:
            return {"error": f"finding the next tokens takes more than {mask_seconds:g} s"}
        if not step and matcher.is_error():
            return {}
        if matcher.is_error() or not mask or time.thread_time() > end:
            break
        random = random * 6364136223846793005 % 2**64
        if not matcher.consume_token(pick_token(mask, random >> 33)) or matcher.is_stopped():
            break
        matcher.compute_ff_tokens()  # as the engine does at every step: whatever that costs or breaks must show here
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    return {"error": error} if error and UNFIT not in error else {}


def pick_token(mask: int, number: int) -> int:
    """Return a set bit of a mask: the first at or above a position that depends on `number`, or the first of all."""
    position = number % mask.bit_length()
    above = mask >> position << position or mask
    return (above & -above).bit_length() - 1


def limit_memory() -> None:
    """Bound what this process may allocate from now on, where the system can, and write no core files."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + MEMORY if hard == resource.RLIM_INFINITY else min(used + MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    run_worker()
