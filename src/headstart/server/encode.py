"""Encode prompts so that only the chat template's own added tokens become control tokens.

A tokenizer turns the text of an added token (`<|im_end|>`, `<think>`, …) into that token wherever it occurs, so users
and tools could end a turn and begin another. Here a mark breaks every such text in the strings of a conversation
before the template is rendered, also where it would arise only next to what the template writes. The rendered text is
split at the added tokens that are left, which are the template's, and what is between them is encoded without added
tokens and without the marks. A conversation that needs no mark is encoded in one call, as it is.

This module imports only `tokenizers`, so that a worker process can use it.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from secrets import randbelow
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace

THINK, THINK_END = "<think>", "</think>"
# What templates look up or compare: it may be part of an added token, and is not marked as such.
KEYWORDS = frozenset({
    "role", "content", "reasoning_content", "tool_calls", "tool_call_id", "id", "type", "function", "name",
    "description", "arguments", "parameters", "properties", "required", "items", "enum", "anyOf", "oneOf", "allOf",
    "default", "title", "format", "const",
})  # fmt: skip

Conversation = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]]
Render = Callable[..., str]  # (messages, tools, options) -> the text of the prompt


@dataclass(frozen=True)
class Breaker:
    """Marks strings so that no added token is found in them, nor arises from them and what is put around them."""

    pattern: re.Pattern[str]
    starts: re.Pattern[str]  # also of tokens that overlap another
    prefixes: frozenset[str]
    suffixes: frozenset[str]
    middles: frozenset[str]  # what a template may have put between brackets: `'<' ~ key ~ '>'`
    ends: re.Pattern[str]  # a character that a token begins or ends with: most strings have none
    longest: int
    fold: Callable[[str], str] | None  # normalise, where tokens are looked for in normalised text

    @classmethod
    def of(cls, tokens: Collection[str], fold: Callable[[str], str] | None) -> "Breaker":
        folded = {fold(token) for token in tokens} if fold is not None else set()
        texts = sorted({*tokens, *folded}, key=len, reverse=True)
        either = "|".join(map(re.escape, texts)) or r"(?!)"
        cuts = [(text, i) for text in texts for i in range(1, len(text))]
        spans = [(text, i, j) for text, i in cuts for j in range(i + 1, len(text))]
        return cls(
            re.compile(either),
            re.compile(f"(?={either})"),
            frozenset(text[:i] for text, i in cuts),
            frozenset(text[i:] for text, i in cuts),
            frozenset(text[i:j] for text, i, j in spans if _is_punctuation(text[:i] + text[j:])),
            re.compile("|".join({re.escape(end) for text in texts for end in (text[0], text[-1])}) or r"(?!)"),
            max(map(len, texts), default=0),
            fold,
        )

    def mark(self, text: str, mark: str, *, middles: bool = True) -> str:
        """Return `text` with `mark` at every place where it must be broken."""
        if self.fold is None and text not in self.middles and not self.ends.search(text):
            return text
        places = sorted(self._places(text, middles=middles))
        if not places:
            return text
        ends = [*places, len(text)]
        return mark.join(text[start:end] for start, end in zip([0, *places], ends, strict=True))

    def mark_all(self, value: Any, mark: str, *, middles: bool = True) -> Any:
        """Return a copy of a JSON value with all of its strings marked, keys too."""
        match value:
            case str():
                return self.mark(value, mark, middles=middles)
            case dict():
                return {
                    self.mark(key, mark, middles=middles and key not in KEYWORDS): self.mark_all(
                        each, mark, middles=middles and key not in ("role", "type")
                    )
                    for key, each in value.items()
                }
            case list() | tuple():
                return [self.mark_all(each, mark, middles=middles) for each in value]
        return value

    def _places(self, text: str, *, middles: bool) -> set[int]:
        places: set[int] = set()
        if self.pattern.search(text):
            places = {found.start() + 1 for found in self.starts.finditer(text)}
        elif self.fold is not None and self.pattern.search(self.fold(text)):
            places = set(range(1, len(text)))  # it arises from other characters, and where from is not known
        # What the template, or another string, puts before or after may complete a token.
        lengths = range(1, min(len(text), self.longest) + 1)
        places |= {length - 1 for length in lengths if text[:length] in self.suffixes}
        places |= {len(text) - length + 1 for length in lengths if text[-length:] in self.prefixes}
        if middles and text in self.middles:
            places.add(len(text) - 1)
        return places


@dataclass(frozen=True)
class Text:
    """A text to be encoded."""

    text: str
    mark: str | None = ""  # that is in it; None: to be put wherever an added token must be broken
    framed: bool = False  # with the tokens that the tokenizer puts around a text


@dataclass(frozen=True)
class Encoder:
    """A tokenizer that can tell the template's added tokens from the user's text."""

    tokenizer: Tokenizer
    breaker: Breaker
    controls: frozenset[int]
    _bare: Tokenizer  # the same without added tokens
    _later: Tokenizer  # and for what does not begin the text, where it treats that otherwise
    _splitter: Tokenizer  # finds added tokens and does nothing else
    _ids: Mapping[int, int]  # the splitter's of added tokens to the tokenizer's

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Encoder":
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        # Runs of spaces and single characters are spelling. They control nothing, and models expect them in text.
        controls = {id: each.content for id, each in added.items() if len(each.content) > 1 and each.content.strip()}
        normalizer = tokenizer.normalizer if any(each.normalized for each in added.values()) else None
        splitter = Tokenizer(WordLevel({"\0": 0}, unk_token="\0"))
        splitter.add_tokens(list(added.values()))
        if normalizer is not None:
            splitter.normalizer = normalizer
        return cls(
            tokenizer,
            Breaker.of(controls.values(), normalizer.normalize_str if normalizer is not None else None),
            frozenset(controls),
            _without_added(tokenizer, tokenizer.pre_tokenizer),
            _without_added(tokenizer, _inside(tokenizer.pre_tokenizer)),
            splitter,
            {each: id for id, token in added.items() if (each := splitter.token_to_id(token.content)) is not None},
        )

    def render(self, render: Render, conversation: Conversation, *, splits_thoughts: bool = False) -> tuple[str, str]:
        """Return the text of a prompt, and the mark that is in it: none where no string needed one.

        `splits_thoughts`: as the function of that name says of the template.
        """
        text = render(*conversation)
        messages, tools, options = conversation
        mark = _new_mark()
        if splits_thoughts:
            messages = [_with_thought(message) for message in messages]
        marked = (
            self.breaker.mark_all(messages, mark),
            self.breaker.mark_all(tools, mark),
            {name: self.breaker.mark_all(value, mark, middles=False) for name, value in options.items()},
        )
        if marked == (list(messages), tools, options):
            return text, ""
        if mark in text:
            return self.render(render, conversation, splits_thoughts=splits_thoughts)
        broken = render(*marked)
        if self._segments(text) == [(piece.replace(mark, ""), token) for piece, token in self._segments(broken)]:
            return text, ""
        return broken, mark

    def ids(self, text: Text) -> list[int]:
        """Return the tokens of a text of any kind."""
        if text.mark is None:
            return self.encode_text(text.text)
        return _ids(self.tokenizer, text.text, framed=True) if text.framed else self.encode(text.text, text.mark)

    def encode(self, text: str, mark: str = "") -> list[int]:
        """Return the tokens of a text. With a `mark`, whatever it breaks is text, and it is left out."""
        if not mark:
            return _ids(self.tokenizer, text)
        ids: list[int] = []
        for i, (piece, token) in enumerate(self._segments(text)):
            ids += self._text(piece.split(mark), begins=i == 0) if token is None else [token]
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text in which nothing is a control token, framed as the tokenizer frames texts."""
        mark = _new_mark()
        if mark in text:
            return self.encode_text(text)
        one, framed = _ids(self._bare, "a"), self._bare.encode("a").ids
        at = framed.index(one[0])
        return [*framed[:at], *self.encode(self.breaker.mark(text, mark), mark), *framed[at + len(one) :]]

    def _text(self, parts: Sequence[str], *, begins: bool) -> list[int]:
        bare = self._bare if begins else self._later
        ids = _ids(bare, "".join(parts))
        if self.controls.isdisjoint(ids):
            return ids
        # The model itself has a word that is an added token too: not across the breaks.
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


def splits_thoughts(render: Render) -> bool:
    """Return whether the template itself takes `<think>…</think>` at the beginning of an answer for its reasoning."""
    question = {"role": "user", "content": "why"}
    answer = {"role": "assistant", "content": f"{THINK}\nperhaps\n{THINK_END}\n\nsurely"}
    return render([question, answer], None, {}) == render([question, _with_thought(answer)], None, {})


def _with_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its inline reasoning apart: in the content it would be text, and never be dropped."""
    content = message.get("content")
    if message["role"] != "assistant" or "reasoning_content" in message or not isinstance(content, str):
        return message
    thought, end, rest = content.lstrip().partition(THINK_END)
    if not end or not thought.startswith(THINK):
        return message
    return {**message, "reasoning_content": thought.removeprefix(THINK).strip("\n"), "content": rest.lstrip("\n")}


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


def _is_punctuation(text: str) -> bool:
    return not any(map(str.isalnum, text))
