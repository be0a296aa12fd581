"""Reasoning and tool calls in the output of models: `output_parser.py` parses them, `grammar.py` enforces them."""

from .grammar import Markup, ThinkingState, any_of, call_grammar, thinking_state, with_thinking
from .output_parser import CALL, Delta, OutputParser, merge
from .schema import Tools, loads, nested_too_deeply

__all__ = [
    "CALL", "Delta", "Markup", "OutputParser", "ThinkingState", "Tools", "any_of", "call_grammar", "loads",
    "merge", "nested_too_deeply", "thinking_state", "with_thinking",
]  # fmt: skip
