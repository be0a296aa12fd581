"""Parse the output of a model while it is generated: reasoning, content and tool calls.

Reasoning starts with `<think>` at the very beginning of the output, or in the prompt, and ends with `</think>`. Tool
calls may come anywhere and are read in both formats, whichever the model was trained on:

- JSON (Hermes, Qwen3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
- XML (Qwen3.5, Qwen3-Coder): `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`

mlx-lm has parsers for both (`json_tools`, `qwen3_coder`). They take the text between the markers once it is complete,
so this module exists for what they do not do: arguments are streamed as they are generated, a marker inside an
argument does not end the call, XML values get the types that the tool's schema states (through `$ref` and `anyOf`
too), and what only looks like a call (an unknown tool, malformed JSON) stays text. Complete calls parse to the same
result as with mlx-lm, which a test asserts.

White space between markup and text belongs to the markup, since chat templates add it again. The white space before a
call is kept only if text continues after it.
"""

import json
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeVar

import regex  # unlike `re`, it can report that more text might complete a match

from .schema import STRING, Tools, dumps, loads, parameter_schema, permitted, to_json

T = TypeVar("T")
DeltaKind = Literal["content", "reasoning", "tool_call", "arguments", "failed_call"]
Parsing = Generator[None, None, T]  # yields where it needs more text

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="

_SPACE = " \t\r\n"
_SPACES = r"[ \t\r\n]*+"
_THINK = regex.compile(_SPACES + THINK)
_CALL_BODY = regex.compile(rf"{_SPACES}(?:{FUNCTION}|(?=\{{))")
_CALL_END = regex.compile(_SPACES + CALL_END)
_PARAMETER = regex.compile(rf"{_SPACES}(?:<parameter=(?P<key>[^<>\r\n]{{1,256}}+)>(?:\n|(?=[^\n]))|</function>)")
_PARAMETER_END = regex.compile(r"\n?</parameter>")
_JSON_NAME = r'\{\s*+"name"\s*+:\s*+'
_ANY_JSON_NAME = regex.compile(rf'(?={_JSON_NAME}"(?P<name>[^"\\]{{0,256}}+)")')
_JSON_CLOSE = regex.compile(r"\s*+\}")
_OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")  # of JSON, besides brackets


@dataclass(frozen=True)
class Delta:
    """One addition to a message.

    A "tool_call" has the function's name as its text; "arguments" are the next fragment of the call's JSON.
    "failed_call" takes a call back that was cut off or is not valid JSON: all its text follows as content or
    reasoning. A stream that has already sent the call cannot unsend it.
    """

    kind: DeltaKind
    text: str = ""
    index: int = 0  # of the tool call


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the same additions in as few deltas as possible."""
    groups = groupby(deltas, key=lambda delta: (delta.kind, delta.index))
    return [Delta(kind, "".join(delta.text for delta in group), index) for (kind, index), group in groups]


def complete_message(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the parts of a whole message, in order and without failed calls.

    Every "tool_call" is followed by its one "arguments".
    """
    parts = list(deltas)
    failed = {part.index for part in parts if part.kind == "failed_call"}
    calls = ("tool_call", "arguments", "failed_call")
    return merge(part for part in parts if part.kind not in calls or part.index not in failed)


class StreamBuffer:
    """Text that arrives in pieces, for parsers written as if it were all there.

    A parser is a generator that yields where the text so far does not decide what comes next. So the result depends
    on the text alone and not on how it was split.
    """

    def __init__(self) -> None:
        self.text = ""  # not consumed yet
        self.ended = False
        self.consumed: list[str] = []  # since the parser last cleared it

    def take(self, count: int) -> str:
        """Consume `count` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        self.consumed.append(taken)
        return taken

    def match(self, pattern: regex.Pattern[str]) -> Parsing["regex.Match[str] | None"]:
        """Consume what the text starts with, if that matches."""
        while True:
            found = pattern.match(self.text, partial=not self.ended)
            if found is None:
                return None
            if not found.partial:
                self.take(found.end())
                return found
            yield

    def until(self, pattern: regex.Pattern[str], emit: Callable[[str], None]) -> Parsing[str | None]:
        """Consume the pattern and all before it, which is emitted as soon as it cannot be part of the pattern.

        Returns what matched, or None if the text ended without it.
        """
        while True:
            found = pattern.search(self.text, partial=not self.ended)
            emit(self.take(found.start() if found else len(self.text)))
            if found and not found.partial:
                return self.take(len(found.group()))
            if self.ended:
                return None
            yield

    def skip_spaces(self) -> Parsing[None]:
        while True:
            self.take(len(self.text) - len(self.text.lstrip(_SPACE)))
            if self.text or self.ended:
                return
            yield

    def json_value(self, emit: Callable[[str], None]) -> Parsing[Any]:
        """Consume an object up to its closing bracket, emit its text as it comes, and return it parsed.

        Returns None if it does not end, or as soon as it cannot be JSON.
        """
        text: list[str] = []
        depth, quoted, escaped, valid = 0, False, False, True
        while True:
            end = len(self.text)
            for at, char in enumerate(self.text):
                if quoted:
                    quoted = escaped or char != '"'
                    escaped = char == "\\" and not escaped
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                else:
                    quoted = char == '"'
                    valid = quoted or char in _OUTSIDE_STRINGS
                if depth == 0 or not valid:
                    end = at + 1 if valid else at
                    break
            if piece := self.take(end):
                text.append(piece)
                emit(piece)
            if depth == 0 and text:
                return _parse("".join(text))
            if not valid or self.ended:
                return None
            yield


class OutputParser:
    """Turns the text of one output into deltas."""

    def __init__(self, tools: Tools | None = None, *, thinking: bool = False, calls_in_thoughts: bool = True):
        """`tools`: those that may be called. `thinking`: the prompt ends in an open `<think>`."""
        self._tools = tools or {}
        self._calls_in_thoughts = calls_in_thoughts
        self.thinking = thinking  # what comes next is reasoning, as far as is known
        self._started = 0  # tool calls
        self._failed = 0
        self._has_text = False  # of this kind
        self._gap = ""  # white space between the text before a call and the text that may follow it
        self._buffer = StreamBuffer()
        self._deltas: list[Delta] = []
        self._parsing = self._parse_output()

    @property
    def called(self) -> bool:
        """Return whether a complete tool call was found."""
        return self._started > self._failed

    def feed(self, text: str) -> list[Delta]:
        """Return what is certain now that `text` has been added."""
        self._buffer.text += text
        next(self._parsing, None)
        deltas, self._deltas = merge(self._deltas), []
        return deltas

    def finish(self) -> list[Delta]:
        """Return what is left when no more text follows."""
        self._buffer.ended = True
        return self.feed("")

    def _parse_output(self) -> Parsing[None]:
        buffer = self._buffer
        if not self.thinking and (yield from buffer.match(_THINK)):
            self.thinking = True
        if self.thinking:
            yield from buffer.skip_spaces()
        while marker := (yield from buffer.until(self._markers(), self._emit_text)):
            if marker.endswith(THINK_END):
                self.thinking, self._has_text, self._gap = False, False, ""
                yield from buffer.skip_spaces()
            else:
                yield from self._parse_call(marker)

    def _markers(self) -> regex.Pattern[str]:
        """Match what ends text here, with the white space before it. Some models forget `<tool_call>`."""
        markers = [THINK_END] if self.thinking else []
        if self._tools and (self._calls_in_thoughts or not self.thinking):
            markers += [CALL, FUNCTION]
        return regex.compile(rf"(?<![ \t\r\n]){_SPACES}(?:{'|'.join(markers)})" if markers else "(?!)")

    def _parse_call(self, opening: str) -> Parsing[None]:
        buffer, index = self._buffer, self._started
        buffer.consumed = []
        is_xml = opening.endswith(FUNCTION)
        body = None if is_xml else (yield from buffer.match(_CALL_BODY))
        complete = False
        if is_xml or (body is not None and body.group().endswith(FUNCTION)):
            complete = yield from self._parse_xml(index)
        elif body is not None:
            complete = yield from self._parse_json(index)
        if complete:
            self._gap = self._gap or opening[: -len(opening.lstrip(_SPACE))]
            yield from buffer.match(_CALL_END)
            yield from buffer.skip_spaces()
            return
        if self._started > index:
            self._emit("failed_call", index)
        self._emit_text(opening + "".join(buffer.consumed))

    def _parse_json(self, index: int) -> Parsing[bool]:
        """Parse a call from its `{` on, and return whether it is complete. Text that is no call emits nothing."""
        names = "|".join(regex.escape(dumps(name)) for name in self._tools)
        head = regex.compile(rf'{_JSON_NAME}(?P<name>{names})\s*+,\s*+"arguments"\s*+:\s*+(?=\{{)')
        if found := (yield from self._buffer.match(head)):
            self._emit("tool_call", index, json.loads(found["name"]))
            arguments = yield from self._buffer.json_value(lambda text: self._emit("arguments", index, text))
            if not isinstance(arguments, dict):
                return False
            yield from self._buffer.match(_JSON_CLOSE)  # models forget it
            return True
        # Its fields are in another order, or there are more: it must be complete before it can be read.
        named = yield from self._buffer.match(_ANY_JSON_NAME)
        if named is not None and named["name"] not in self._tools:
            return False
        call = yield from self._buffer.json_value(lambda _: None)
        if not isinstance(call, dict) or call.get("name") not in list(self._tools):
            return False
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return False
        self._emit("tool_call", index, call["name"])
        self._emit("arguments", index, dumps(arguments))
        return True

    def _parse_xml(self, index: int) -> Parsing[bool]:
        """Parse a call after its `<function=`, and return whether it is complete.

        A value is bare text. One line break after `<parameter=key>` and one before `</parameter>` are not part of it.
        """
        buffer = self._buffer
        names = "|".join(map(regex.escape, self._tools))
        head = regex.compile(rf"(?P<name>{names})>{_SPACES}(?=<parameter=|</function>)")
        found = yield from buffer.match(head)
        if found is None:
            return False
        schema = self._tools[found["name"]]
        self._emit("tool_call", index, found["name"])
        opening = "{"
        while part := (yield from buffer.match(_PARAMETER)):
            if part["key"] is None:
                self._emit("arguments", index, "{}" if opening == "{" else "}")
                return True
            self._emit("arguments", index, f"{opening}{dumps(part['key'])}: ")
            opening = ", "
            types = permitted(parameter_schema(schema, part["key"]), schema).types
            if types == STRING:  # so it can be streamed before it is complete
                self._emit("arguments", index, '"')
                end = yield from buffer.until(
                    _PARAMETER_END, lambda text: self._emit("arguments", index, dumps(text)[1:-1])
                )
                value = '"'
            else:
                pieces: list[str] = []
                end = yield from buffer.until(_PARAMETER_END, pieces.append)
                value = to_json("".join(pieces), types)
            if end is None:
                return False
            self._emit("arguments", index, value)
        return False

    def _emit_text(self, text: str) -> None:
        if text:
            gap = self._gap if self._has_text else ""
            self._deltas.append(Delta("reasoning" if self.thinking else "content", gap + text))
            self._has_text, self._gap = True, ""

    def _emit(self, kind: DeltaKind, index: int, text: str = "") -> None:
        self._started += kind == "tool_call"
        self._failed += kind == "failed_call"
        if text or kind == "failed_call":
            self._deltas.append(Delta(kind, text, index))


def _parse(text: str) -> Any:
    try:
        return loads(text)
    except ValueError:
        return None
