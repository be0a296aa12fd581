"""What the output of a model adds to an assistant message, piece by piece."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal


@dataclass(frozen=True)
class Delta:
    """One addition to a message.

    A "tool_call" has the function's name as its text; "arguments" are the next fragment of the call's JSON.
    "failed_call" takes a call back that was cut off or is not valid JSON: all its text follows as content or
    reasoning. A stream that has already sent the call cannot unsend it.
    """

    kind: Literal["content", "reasoning", "tool_call", "arguments", "failed_call"]
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
