"""How many drafts a round a request asks for, by the same name in every API."""

from typing import Annotated, Literal

from pydantic import Field

from ..limits import MAX_K
from .errors import refuse

Drafts = Annotated[int | Literal["auto"] | None, Field(description="Drafts a round; 0 drafts nothing.")]


def depth(asked: Drafts) -> int | Literal["auto"]:
    """The engine's k: no model drafts more than `MAX_K`."""
    if asked is None or asked == "auto":
        return "auto"
    if asked < 0:
        refuse("num_draft_tokens", f"is {asked}; it must be 'auto', 0 or more")
    return min(asked, MAX_K)


def clamped_to(asked: Drafts, told: int | None) -> int | None:
    """The depth that ran at most, where more was asked for. `told`: what the engine says of its model."""
    return MAX_K if told is None and isinstance(asked, int) and asked > MAX_K else told
