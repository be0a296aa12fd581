"""The tokens that are not learned from text. They are the last of every vocabulary made here, in this order."""

from typing import NamedTuple

SIZE = 8192
ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CONTROL = 3  # so many of them, the first, never stand in text; the others are written by the model as text is


class Added(NamedTuple):
    end_of_text: int
    im_start: int
    im_end: int
    think: int
    end_of_think: int
    tool_call: int
    end_of_tool_call: int


def added(size: int) -> Added:
    """Their ids in a vocabulary of that size."""
    first = size - len(ADDED)
    return Added(first, first + 1, first + 2, first + 3, first + 4, first + 5, first + 6)
