"""When a request must have ended."""

import asyncio
from dataclasses import dataclass

from .errors import Refusal


@dataclass(frozen=True)
class Deadline:
    seconds: float
    at: float  # by the event loop's clock

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        return cls(seconds, asyncio.get_running_loop().time() + seconds)

    def missed(self) -> Refusal:
        message = f"no end after {self.seconds:g} seconds: ask for fewer tokens"
        # The client's library would ask for the same again.
        return Refusal(408, message, code="timeout", headers={"x-should-retry": "false"})
