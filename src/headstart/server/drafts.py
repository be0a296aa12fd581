"""How many drafts a round a request asks for, by the same name in every API."""

from typing import Literal

from pydantic import Field

from ..cards import MAX_K
from .errors import refuse
from .shape import Shape


class Drafts(Shape):
    num_draft_tokens: int | Literal["auto"] | None = Field(None, description="Drafts a round; 0 drafts nothing.")

    @property
    def k(self) -> int | Literal["auto"]:
        """What is asked of the engine: no model drafts more than `MAX_K`."""
        k = self.num_draft_tokens
        if k is None or k == "auto":
            return "auto"
        if k < 0:
            refuse("num_draft_tokens", f"is {k}; it must be 'auto', 0 or more")
        return min(k, MAX_K)

    def clamped_to(self, told: int | None) -> int | None:
        """The depth that ran at most, where more was asked for. `told`: what the engine says of its model."""
        k = self.num_draft_tokens
        return MAX_K if told is None and isinstance(k, int) and k > MAX_K else told
