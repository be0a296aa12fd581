"""What the engine is to read, and how its answer is to be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..sampling import GrammarSpec
from .markup import Reader, Tools


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    param: str  # the field that it came in
    plain: bool = False  # no chat: whatever the model writes is text
    thinking: bool = False  # it ends in an open thought
    tools: Tools = field(default_factory=dict)  # that may be called
    grammar: GrammarSpec | None = None
    bias: Mapping[int, float] = field(default_factory=dict)  # against calls where none may come
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what the makers recommend where nothing was asked

    def reader(self) -> Reader | None:
        """A new one for every answer."""
        return None if self.plain else Reader(self.tools, thinking=self.thinking)
