"""Counts what each slice of a server's event loop handles: by size, and not by the clock."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

TEXTS = (str, bytes, bytearray)
# Functions in C that take as long as what they are given is large.
WHOLE = {
    "from_json", "to_json", "validate_python", "validate_json", "loads", "dumps", "scan_once", "encode_basestring",
    "b64decode", "b64encode", "a2b_base64", "b2a_base64", "compress", "decompress", "frombytes", "tolist", "join",
    "extend",
}  # fmt: skip


@dataclass
class Slices:
    """The largest slices so far, each with the function that took most of it."""

    calls: tuple[int, str] = (0, "")  # of functions
    characters: tuple[int, str] = (0, "")  # or bytes, or elements, that functions in C went through
    seen: int = field(default=0, repr=False)


class Slice:
    def __init__(self) -> None:
        self.calls = self.characters = 0
        self.where: dict[str, list[int]] = {}

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_call"):
            return
        size = self._size(frame, function) if event == "c_call" else 0
        self.calls += 1
        self.characters += size
        known = self.where.setdefault(frame.f_code.co_qualname, [0, 0])
        known[0] += 1
        known[1] += size

    @staticmethod
    def _size(frame: FrameType, function: Any) -> int:
        """What a function in C goes through: the text whose method it is, or the largest that its caller has."""
        if isinstance(function.__self__, TEXTS) and function.__name__ not in ("join", "startswith", "clear"):
            return len(function.__self__)
        if function.__name__ not in WHOLE:
            return 0
        return max(
            (len(each) for each in frame.f_locals.values() if isinstance(each, (*TEXTS, list, dict))), default=0
        )

    def most(self, i: int) -> str:
        return max(self.where, key=lambda name: self.where[name][i], default="")


@contextmanager
def watched() -> Iterator[Slices]:
    """Watch the event loops of all threads."""
    found, run = Slices(), asyncio.Handle._run

    def watching(handle: asyncio.Handle) -> None:
        now = Slice()
        sys.setprofile(now)
        try:
            run(handle)
        finally:
            sys.setprofile(None)
            found.seen += 1
            found.calls = max(found.calls, (now.calls, now.most(0)))
            found.characters = max(found.characters, (now.characters, now.most(1)))

    asyncio.Handle._run = watching  # type: ignore[method-assign]
    try:
        yield found
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
