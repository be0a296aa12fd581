"""Thoughts and calls in what a model writes: `reader.py` reads them as they come, `grammar.py` asks for them."""

from .delta import Call, Content, Delta, Message, Reasoning, ToolArguments, ToolBroken, ToolCall, merged
from .dialect import Dialect, thought_in
from .grammar import call_grammar, either, think_first
from .reader import CALL, Reader
from .schema import Tools, flaw
from .value import loads, too_deep

__all__ = [
    "CALL", "Call", "Content", "Delta", "Dialect", "Message", "Reader", "Reasoning", "ToolArguments",
    "ToolBroken", "ToolCall", "Tools", "call_grammar", "either", "flaw", "loads", "merged",
    "think_first", "thought_in", "too_deep",
]  # fmt: skip
