"""Reads an answer as it comes: what was thought, what was said, and which tools were called.

A thought is told from the rest by `<think>` at the very beginning, or by the prompt that has opened it, and lasts to
`</think>`. A call may stand anywhere, in a thought too unless a grammar has calls come later, and in either of the
two ways of writing one, whichever the model was taught. What only looks like markup is text like any other: a call
that no tool answers to, or that is not well formed. Blanks between markup and text belong to the markup: chat
templates put them there again. Only where text goes on behind a call do those before the call stay, since the call is
taken out from between.
"""

import regex

from .delta import Content, Delta, Reasoning, ToolBroken, ToolCall, merged
from .json_call import read_json
from .schema import Tools
from .stream_buffer import BLANKS, StreamBuffer, UnseenPairs
from .xml_call import FUNCTION, read_xml

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

_BLANKS = r"[ \t\r\n]*+"
_THOUGHT = regex.compile(_BLANKS + THINK)
_BODY = regex.compile(rf"{_BLANKS}(?:{FUNCTION}|(?=\{{))")
_END = regex.compile(_BLANKS + CALL_END)


class Reader:
    def __init__(self, tools: Tools | None = None, *, thinking: bool = False, calls_in_thoughts: bool = True):
        """`tools`: those that may be called. `thinking`: the prompt ends in an open `<think>`."""
        self._tools, self._calls_in_thoughts = tools or {}, calls_in_thoughts
        self._voice: type[Content | Reasoning] = Reasoning if thinking else Content
        self._calls = 0  # that have begun
        self._broken = 0
        self._said = False  # something, in this voice
        self._gap = ""  # between what was said before a call and what may be said after
        self._tape = StreamBuffer()
        self._deltas: list[Delta] = []
        self._course = self._answer()

    @property
    def thinking(self) -> bool:
        """What comes next is thought, for all that is known."""
        return self._voice is Reasoning

    @property
    def called(self) -> bool:
        """A tool was."""
        return self._calls > self._broken

    def feed(self, text: str) -> list[Delta]:
        """What is certain now that `text` is known."""
        self._tape.text += text
        next(self._course, None)
        deltas, self._deltas = merged(self._deltas), []
        return deltas

    def finish(self) -> list[Delta]:
        """What is left when no text follows."""
        self._tape.ended = True
        return self.feed("")

    def _answer(self) -> UnseenPairs[None]:
        tape = self._tape
        if not self.thinking and (yield from tape.match(_THOUGHT)):
            self._voice = Reasoning
        if self.thinking:
            yield from tape.skip_blanks()
        while mark := (yield from tape.until(self._marks(), self._say)):
            if not mark.endswith(THINK_END):
                yield from self._call(mark)
                continue
            self._voice, self._said, self._gap = Content, False, ""
            yield from tape.skip_blanks()

    def _marks(self) -> regex.Pattern[str]:
        """What ends text here, with the blanks before it. Some models forget `<tool_call>`."""
        marks = [THINK_END] if self.thinking else []
        marks += [CALL, FUNCTION] if self._tools and (self._calls_in_thoughts or not self.thinking) else []
        return regex.compile(rf"(?<![ \t\r\n]){_BLANKS}(?:{'|'.join(marks)})" if marks else "(?!)")

    def _call(self, opening: str) -> UnseenPairs[None]:
        tape, index = self._tape, self._calls
        tape.mark()
        xml = opening.endswith(FUNCTION)
        body = None if xml else (yield from tape.match(_BODY))
        whole = False
        if xml or body is not None:
            xml = xml or (body is not None and body.group().endswith(FUNCTION))
            whole = yield from (read_xml if xml else read_json)(tape, self._tools, index, self._emit)
        if whole:
            self._gap = self._gap or opening[: -len(opening.lstrip(BLANKS))]
            yield from tape.match(_END)
            yield from tape.skip_blanks()
            return
        if self._calls > index:
            self._broken += 1
            self._emit(ToolBroken(index))
        self._say(opening + tape.since_mark())

    def _say(self, text: str) -> None:
        self._emit(self._voice((self._gap if self._said else "") + text))
        self._said, self._gap = True, ""

    def _emit(self, delta: Delta) -> None:
        self._calls += isinstance(delta, ToolCall)
        self._deltas.append(delta)
