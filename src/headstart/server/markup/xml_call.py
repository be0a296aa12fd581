"""Calls as Qwen3.5 and Qwen3-Coder write them: `<function=name><parameter=key>value</parameter>…</function>`.

Values are bare text, and the tool's schema says what they are. One line break after `<parameter=key>` and one before
`</parameter>` are not theirs, as in mlx-lm's parser. But where that makes null of every "null", and text of a number
in an anyOf, here the schema decides.
"""

from collections.abc import Callable

import regex

from .delta import Delta, ToolArguments, ToolCall
from .schema import Tools, parameter, permitted
from .stream_buffer import StreamBuffer, UnseenPairs
from .value import TEXT, dumps, json_of

FUNCTION = "<function="
_PART = regex.compile(r"[ \t\r\n]*+(?:<parameter=(?P<key>[^<>\r\n]{1,256}+)>(?:\n|(?=[^\n]))|</function>)")
_VALUE_END = regex.compile(r"\n?</parameter>")


def read_xml(tape: StreamBuffer, tools: Tools, index: int, say: Callable[[Delta], None]) -> UnseenPairs[bool]:
    """A call from behind its `<function=` → whether it is whole. No call at all says nothing."""
    names = "|".join(map(regex.escape, tools))
    head = yield from tape.match(regex.compile(rf"(?P<name>{names})>[ \t\r\n]*+(?=<parameter=|</function>)"))
    if head is None:
        return False
    schema = tools[head["name"]]
    say(ToolCall(index, head["name"]))

    def add(fragment: str) -> None:
        say(ToolArguments(index, fragment))

    before = "{"
    while part := (yield from tape.match(_PART)):
        key = part["key"]
        if key is None:
            add("}" if before == ", " else "{}")
            return True
        add(f"{before}{dumps(key)}: ")
        before = ", "
        types = permitted(parameter(schema, key), schema).types
        if types == TEXT:  # known to be text before it is all there
            add('"')
            end = yield from tape.until(_VALUE_END, lambda text: add(dumps(text)[1:-1]))
            add('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from tape.until(_VALUE_END, pieces.append)
            add(json_of("".join(pieces), types) if end else "")
        if end is None:
            return False
    return False
