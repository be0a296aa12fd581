"""What a request may ask."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from ..errors import RequestError

MAX_K = 8  # drafts a round


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int = 256
    k: int | Literal["auto"] = "auto"  # drafts a round
    stop_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.k != "auto" and not 0 <= self.k <= MAX_K:
            raise RequestError(f"k is {self.k!r}; it must be 'auto' or a whole number from 0 to {MAX_K}")
