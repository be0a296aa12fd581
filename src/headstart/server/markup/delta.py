"""What an answer adds as it is read, and the message that comes of it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call has begun. Its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """The next piece of a call's arguments, which together are a JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True)
class ToolBroken:
    """A call that had begun is none: it was cut off, or is not JSON. All its text follows, as content or reasoning.
    Who has passed on what was there of it cannot take it back; who has not should forget it."""

    index: int


Delta = Content | Reasoning | ToolCall | ToolArguments | ToolBroken


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str = ""  # a JSON object


@dataclass(frozen=True)
class Message:
    content: str
    reasoning: str
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> "Message":
        """A whole message has no broken calls, only their text."""
        content, reasoning, calls = list[str](), list[str](), dict[int, Call]()
        for delta in merged(deltas):
            match delta:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case ToolCall(index, name):
                    calls[index] = Call(name)
                case ToolArguments(index, fragment):
                    calls[index] = replace(calls[index], arguments=calls[index].arguments + fragment)
                case ToolBroken(index):
                    del calls[index]
        return cls("".join(content), "".join(reasoning), tuple(calls.values()))


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """The same in as few pieces as can be."""
    groups: list[list[Delta]] = []
    for delta in deltas:
        if groups and _go_together(groups[-1][0], delta):
            groups[-1].append(delta)
        else:
            groups.append([delta])
    return [_joined(group) for group in groups]


def _go_together(one: Delta, other: Delta) -> bool:
    match one, other:
        case (Content(), Content()) | (Reasoning(), Reasoning()):
            return True
        case ToolArguments(index), ToolArguments(same):
            return index == same
    return False


def _joined(group: list[Delta]) -> Delta:
    first = group[0]
    match first:
        case Content() | Reasoning():
            return replace(first, text="".join(each.text for each in group if isinstance(each, type(first))))
        case ToolArguments():
            fragments = [each.fragment for each in group if isinstance(each, ToolArguments)]
            return replace(first, fragment="".join(fragments))
    return first
