"""What the engine is to read, and how its answer is to be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..sampling import GrammarSpec
from ..sampling.grammar import Grammar
from .markup import Reader, Tools


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    param: str  # the field that it came in
    text: str | None = None  # as it was sent, where it is no chat: whatever the model writes is then text
    thinking: bool = False  # it ends in an open thought
    tools: Tools = field(default_factory=dict)  # that may be called
    calls_in_thoughts: bool = True
    grammar: GrammarSpec | None = None
    compiled: Grammar | None = None  # held, so that the engine finds it
    bias: Mapping[int, float] = field(default_factory=dict)  # against calls where none may come
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what the makers recommend where nothing was asked
    ignored: tuple[str, ...] = ()  # what was read otherwise than it was sent

    def reader(self) -> Reader | None:
        """A new one for every answer."""
        if self.text is not None:
            return None
        return Reader(self.tools, thinking=self.thinking, calls_in_thoughts=self.calls_in_thoughts)
