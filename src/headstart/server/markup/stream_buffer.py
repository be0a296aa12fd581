"""Text as it comes, for readers that are written as if it were all there.

A reader is a generator. It asks for what comes next, and where the text so far cannot tell it yields until there is
more. So what it makes of an answer depends on the answer and not on how it was cut into pieces.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

import regex  # can tell what might still match from what cannot

T = TypeVar("T")
UnseenPairs = Generator[None, None, T]

BLANKS = " \t\r\n"


class StreamBuffer:
    def __init__(self) -> None:
        self.text = ""  # not taken yet
        self.ended = False  # nothing follows it
        self._taken: list[str] = []

    def mark(self) -> None:
        self._taken = []

    def since_mark(self) -> str:
        return "".join(self._taken)

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        self._taken.append(taken)
        return taken

    def match(self, pattern: regex.Pattern[str]) -> UnseenPairs["regex.Match[str] | None"]:
        """Take what the text begins with, if that is the pattern. The pattern must end in something definite."""
        while True:
            found = pattern.match(self.text, partial=not self.ended)
            if found is None:
                return None
            if not found.partial:
                self.take(found.end())
                return found
            yield

    def until(self, pattern: regex.Pattern[str], say: Callable[[str], None]) -> UnseenPairs[str | None]:
        """Take the text before the pattern, saying it as soon as it cannot be part of it, and then the pattern.
        None where the text ends without it."""
        while True:
            found = pattern.search(self.text, partial=not self.ended)
            if before := self.take(found.start() if found else len(self.text)):
                say(before)
            if found and not found.partial:
                return self.take(len(found.group()))
            if self.ended:
                return None
            yield

    def skip_blanks(self) -> UnseenPairs[None]:
        while True:
            self.take(len(self.text) - len(self.text.lstrip(BLANKS)))
            if self.text or self.ended:
                return
            yield
