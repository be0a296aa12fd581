"""Calls as Hermes models and Qwen3 write them: `{"name": …, "arguments": {…}}`. Arguments go on as they are."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import regex

from .delta import Delta, ToolArguments, ToolCall
from .schema import Tools
from .stream_buffer import StreamBuffer, UnseenPairs
from .value import dumps, loads

_NAME = r'\{\s*+"name"\s*+:\s*+'
_ANY_NAME = regex.compile(rf'(?={_NAME}"(?P<name>[^"\\]{{0,256}}+)")')
_CLOSE = regex.compile(r"\s*+\}")
_BARE = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")  # what JSON has outside of strings, besides brackets


def read_json(tape: StreamBuffer, tools: Tools, index: int, say: Callable[[Delta], None]) -> UnseenPairs[bool]:
    """A call from its `{` → whether it is whole. No call at all says nothing."""
    names = "|".join(regex.escape(dumps(name)) for name in tools)
    known = regex.compile(rf'{_NAME}(?P<name>{names})\s*+,\s*+"arguments"\s*+:\s*+(?=\{{)')
    head = yield from tape.match(known)
    if head is None:
        return (yield from _read_at_its_end(tape, tools, index, say))
    say(ToolCall(index, json.loads(head["name"])))
    arguments: list[str] = []

    def add(fragment: str) -> None:
        arguments.append(fragment)
        say(ToolArguments(index, fragment))

    whole = yield from _take_object(tape, add)
    if not whole or not isinstance(_parsed(arguments), dict):
        return False
    yield from tape.match(_CLOSE)  # models forget it
    return True


def _read_at_its_end(tape: StreamBuffer, tools: Tools, index: int, say: Callable[[Delta], None]) -> UnseenPairs[bool]:
    """A call that does not begin with its name and arguments."""
    named = yield from tape.match(_ANY_NAME)
    if named is not None and named["name"] not in tools:
        return False
    pieces: list[str] = []
    call = _parsed(pieces) if (yield from _take_object(tape, pieces.append)) else None
    if not isinstance(call, dict) or call.get("name") not in list(tools):
        return False
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return False
    say(ToolCall(index, call["name"]))
    say(ToolArguments(index, dumps(arguments)))
    return True


def _parsed(pieces: list[str]) -> object:
    try:
        return loads("".join(pieces))
    except ValueError:
        return None


def _take_object(tape: StreamBuffer, say: Callable[[str], None]) -> UnseenPairs[bool]:
    """From a bracket to the one that closes it. False where it is not closed, or something else comes up."""
    brackets = Brackets()
    while True:
        end = brackets.scan(tape.text)
        if taken := tape.take(end):
            say(taken)
        if brackets.closed:
            return True
        if tape.text or tape.ended:
            return False
        yield


@dataclass
class Brackets:
    """Where in some JSON the reader is."""

    depth: int = 0
    quoted: bool = False
    escaped: bool = False
    closed: bool = False

    def scan(self, text: str) -> int:
        """How much of the text belongs to it: all, up to the last bracket, or up to what is no JSON."""
        for at, char in enumerate(text):
            if self.quoted:
                if self.escaped:
                    self.escaped = False
                elif char == "\\":
                    self.escaped = True
                elif char == '"':
                    self.quoted = False
            elif char == '"':
                self.quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.closed = True
                    return at + 1
            elif char not in _BARE:
                return at
        return len(text)
