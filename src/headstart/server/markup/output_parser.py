"""Parse the output of a model while it is generated: reasoning, content and tool calls.

Reasoning starts with `<think>` at the very beginning of the output, or in the prompt, and ends with `</think>`. Tool
calls may come anywhere and are read in both formats, whichever the model was trained on:

- JSON (Hermes, Qwen3): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
- Gemma 4's, see `gemma.py`, whose reasoning has other markers too
- XML (Qwen3.5, Qwen3-Coder): `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`

mlx-lm has parsers for both (`json_tools`, `qwen3_coder`). They take the text between the markers once it is complete,
so this module exists for what they do not do: arguments are streamed as they are generated, a marker inside an
argument does not end the call, XML values get the types that the tool's schema states (through `$ref` and `anyOf`
too), and a call of an unknown tool stays text. Complete calls parse to the same result as with mlx-lm, which a test
asserts. The arguments of a call that is cut off or malformed are what the model wrote of them, as in OpenAI's API:
they are never valid JSON.

White space between markup and text belongs to the markup, since chat templates add it again.
"""

import json
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

import regex  # unlike `re`, it can report that more text might complete a match

from .gemma import CHANNEL, CHANNEL_END, GEMMA_CALL, GEMMA_CALL_END, QUOTE, THOUGHT, gemma_arguments
from .schema import STRING, Tools, dumps, loads, parameter_schema, permitted, to_json

T = TypeVar("T")
DeltaKind = Literal["content", "reasoning", "tool_call", "arguments"]
Parsing = Generator[None, None, T]  # yields where it needs more text

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="

_SPACE = " \t\r\n"
_SPACES = r"[ \t\r\n]*+"
_THINK = regex.compile(rf"{_SPACES}(?:{THINK}|{regex.escape(CHANNEL + THOUGHT)})")
_GEMMA_STOP = regex.compile("|".join(map(regex.escape, (QUOTE, GEMMA_CALL_END))))
_CALL_BODY = regex.compile(rf"{_SPACES}(?:{FUNCTION}|(?=\{{))")
_CALL_END = regex.compile(_SPACES + CALL_END)
_PARAMETER = regex.compile(rf"{_SPACES}(?:<parameter=(?P<key>[^<>\r\n]{{1,256}}+)>(?:\n|(?=[^\n]))|</function>)")
_PARAMETER_END = regex.compile(r"\n?</parameter>")
_JSON_NAME = r'\{\s*+"name"\s*+:\s*+'
_JSON_CLOSE = regex.compile(r"\s*+\}")


@dataclass(frozen=True)
class Delta:
    """One addition to a message.

    A "tool_call" has the function's name as its text; "arguments" are the next fragment of the call's JSON.
    """

    kind: DeltaKind
    text: str = ""
    index: int = 0  # of the tool call


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the same additions in as few deltas as possible."""
    groups = groupby(deltas, key=lambda delta: (delta.kind, delta.index))
    return [Delta(kind, "".join(delta.text for delta in group), index) for (kind, index), group in groups]


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

    def json_object(self, emit: Callable[[str], None]) -> Parsing[bool]:
        """Consume an object up to its closing bracket and emit its text as it comes. Return whether it ended."""
        depth, quoted, escaped = 0, False, False
        while True:
            for at, char in enumerate(self.text):
                if quoted:
                    quoted = escaped or char != '"'
                    escaped = char == "\\" and not escaped
                    continue
                quoted = char == '"'
                depth += (char in "{[") - (char in "}]")
                if char == "<":  # of the end marker: the object is malformed
                    emit(self.take(at))
                    return False
                if depth == 0:
                    emit(self.take(at + 1))
                    return True
            emit(self.take(len(self.text)))
            if self.ended:
                return False
            yield


class OutputParser:
    """Turns the text of one output into deltas."""

    def __init__(self, tools: Tools | None = None, *, thinking: bool = False, calls_in_thoughts: bool = True):
        """`tools`: those that may be called. `thinking`: the prompt ends in an open `<think>`."""
        self._tools = tools or {}
        self._calls_in_thoughts = calls_in_thoughts
        self.thinking = thinking  # what comes next is reasoning, as far as is known
        self._think_end = THINK_END
        self.calls = 0  # that were begun
        self.broken = False  # one of them is cut off or malformed
        self._arguments: list[str] = []  # of the last call
        self._gap = ""  # white space before a call, kept only if text continues after it
        self._buffer = StreamBuffer()
        self._deltas: list[Delta] = []
        self._parsing = self._parse_output()

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
        if not self.thinking and (opening := (yield from buffer.match(_THINK))):
            self.thinking = True
            self._think_end = THINK_END if opening.group().endswith(THINK) else CHANNEL_END
        if self.thinking:
            yield from buffer.skip_spaces()
        while marker := (yield from buffer.until(self._markers(), self._emit_text)):
            if self.thinking and marker.endswith(self._think_end):
                self.thinking, self._gap = False, ""
                yield from buffer.skip_spaces()
            else:
                yield from self._parse_call(marker)

    def _markers(self) -> regex.Pattern[str]:
        """Match what ends text here, with the white space before it. Some models forget `<tool_call>`."""
        markers = [regex.escape(self._think_end)] if self.thinking else []
        if self._tools and (self._calls_in_thoughts or not self.thinking):
            markers += [CALL, FUNCTION, regex.escape(GEMMA_CALL)]
        return regex.compile(rf"(?<![ \t\r\n]){_SPACES}(?:{'|'.join(markers)})" if markers else "(?!)")

    def _parse_call(self, opening: str) -> Parsing[None]:
        buffer, calls_before = self._buffer, self.calls
        buffer.consumed = []
        gemma = opening.endswith(GEMMA_CALL)
        body = None if gemma or opening.endswith(FUNCTION) else (yield from buffer.match(_CALL_BODY))
        complete = False
        if gemma:
            yield from self._parse_gemma()
        elif opening.endswith(FUNCTION) or (body is not None and body.group().endswith(FUNCTION)):
            complete = yield from self._parse_xml()
        elif body is not None:
            complete = yield from self._parse_json()
        if self.calls == calls_before:  # it only looked like a call
            self._emit_text(opening + "".join(buffer.consumed))
            return
        try:
            loads("".join(self._arguments))
        except ValueError:
            self.broken = True
        self._gap = self._gap or opening[: -len(opening.lstrip(_SPACE))]
        if complete:
            yield from buffer.match(_CALL_END)
        elif not gemma:
            yield from buffer.until(_CALL_END, lambda _: None)
        yield from buffer.skip_spaces()

    def _parse_json(self) -> Parsing[bool]:
        """Parse a call from its `{` on, and return whether it is complete. Text that is no call emits nothing."""
        buffer = self._buffer
        names = "|".join(regex.escape(dumps(name)) for name in self._tools)
        head = regex.compile(rf'{_JSON_NAME}(?P<name>{names})\s*+,\s*+"arguments"\s*+:\s*+(?=\{{)')
        if found := (yield from buffer.match(head)):
            self._start_call(json.loads(found["name"]))
            complete = yield from buffer.json_object(self._emit_arguments)
            yield from buffer.match(_JSON_CLOSE)  # models forget it
            return complete
        # Its fields are in another order, or there are more: it must be complete before it can be read.
        pieces: list[str] = []
        yield from buffer.json_object(pieces.append)
        try:
            call = loads("".join(pieces))
        except ValueError:
            return False
        arguments = call.get("arguments", {})
        if call.get("name") not in list(self._tools) or not isinstance(arguments, dict):
            return False
        self._start_call(call["name"])
        self._emit_arguments(dumps(arguments))
        return True

    def _parse_xml(self) -> Parsing[bool]:
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
        self._start_call(found["name"])
        self._emit_arguments("{")
        separator = ""
        while part := (yield from buffer.match(_PARAMETER)):
            if part["key"] is None:
                self._emit_arguments("}")
                return True
            self._emit_arguments(f"{separator}{dumps(part['key'])}: ")
            separator = ", "
            types = permitted(parameter_schema(schema, part["key"]), schema).types
            if types == STRING:  # so it can be streamed before it is complete
                self._emit_arguments('"')
                end = yield from buffer.until(_PARAMETER_END, lambda text: self._emit_arguments(dumps(text)[1:-1]))
                value = '"'
            else:
                pieces: list[str] = []
                end = yield from buffer.until(_PARAMETER_END, pieces.append)
                value = to_json("".join(pieces), types)
            if end is None:
                return False
            self._emit_arguments(value)
        return False

    def _parse_gemma(self) -> Parsing[None]:
        """Parse one of Gemma 4's calls after its marker. Arguments are emitted once they are complete."""
        buffer, pieces, quoted = self._buffer, list[str](), False
        names = "|".join(map(regex.escape, self._tools))
        found = yield from buffer.match(regex.compile(rf"{_SPACES}call:(?P<name>{names})(?=\{{)"))
        if found is None:
            return
        self._start_call(found["name"])
        while (stop := (yield from buffer.until(_GEMMA_STOP, pieces.append))) is not None:
            if stop == GEMMA_CALL_END and not quoted:
                break
            quoted ^= stop == QUOTE
            pieces.append(stop)
        written = "".join(pieces)
        try:
            arguments = gemma_arguments(written) if stop is not None else None
        except ValueError:
            arguments = None
        self._emit_arguments(dumps(arguments) if isinstance(arguments, dict) else written)

    def _emit_text(self, text: str) -> None:
        if text:
            self._deltas.append(Delta("reasoning" if self.thinking else "content", self._gap + text))
            self._gap = ""

    def _start_call(self, name: str) -> None:
        self._deltas.append(Delta("tool_call", name, self.calls))
        self.calls += 1
        self._arguments = []

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(Delta("arguments", text, self.calls - 1))
            self._arguments.append(text)
