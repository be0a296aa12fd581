"""Encode prompts so that only the chat template's own added tokens become control tokens.

A tokenizer turns the text of an added token (`<|im_end|>`, `<think>`, …) into that token wherever it occurs, so users
and tools could end a turn and begin another. Here a mark breaks every such text in the strings of a conversation
before the template is rendered, also where it would arise only next to what the template writes. The rendered text is
split at the added tokens that are left, which are the template's, and what is between them is encoded without added
tokens and without the marks. A conversation that needs no mark is encoded in one call, as it is.

This module imports only `tokenizers`, so that a worker process can use it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from secrets import randbelow
from typing import Any, Literal

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

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
        self._bare = _without_added(tokenizer, tokenizer.pre_tokenizer)
        # The same for text that does not begin the prompt, which some tokenizers treat differently.
        self._later = _without_added(tokenizer, _inside(tokenizer.pre_tokenizer))
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
        if mark in text:
            return self.render(render, conversation)
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
        for i, (piece, token) in enumerate(segments):
            ids += self._encode_piece(piece.split(mark), begins=i == 0) if token is None else [token]
        return ids

    def _encode_literal(self, text: str) -> list[int]:
        """Return the tokens of a text in which nothing is a control token, framed as the tokenizer frames texts."""
        mark = _new_mark()
        if mark in text:
            return self._encode_literal(text)
        one, framed = _ids(self._bare, "a"), self._bare.encode("a").ids
        at = framed.index(one[0])
        return [*framed[:at], *self._encode_chat(self._breaker.mark(text, mark), mark), *framed[at + len(one) :]]

    def _encode_piece(self, parts: Sequence[str], *, begins: bool) -> list[int]:
        """Return the tokens of text between added tokens. `parts`: the text, split where it must stay broken."""
        bare = self._bare if begins else self._later
        ids = _ids(bare, "".join(parts))
        if self._controls.isdisjoint(ids):
            return ids
        # The model's own vocabulary has an added token's text: do not let it form across the breaks.
        return [id for part in parts for id in _ids(bare, part)]

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


def _without_added(tokenizer: Tokenizer, pre_tokenizer: Any) -> Tokenizer:
    """Return a tokenizer with the same model, which is shared, and no added tokens."""
    bare = Tokenizer(tokenizer.model)
    for name, part in (
        ("normalizer", tokenizer.normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("post_processor", tokenizer.post_processor),
    ):
        if part is not None:
            setattr(bare, name, part)
    return bare


def _inside(pre_tokenizer: Any) -> Any:
    if isinstance(pre_tokenizer, Metaspace) and pre_tokenizer.prepend_scheme == "first":
        return Metaspace(pre_tokenizer.replacement, "never", pre_tokenizer.split)
    return pre_tokenizer


def _new_mark() -> str:
    return f"~{randbelow(10**18)}^"  # survives JSON, HTML and changes of case, and cannot overlap itself
