"""One batched loop: `step.py` is its body, `engine.py` what keeps it turning."""

from .async_engine import AsyncEngine
from .depth import Depth
from .engine import Engine
from .request import Event, FinishReason, Handle, Request, TokenLogprobs
from .room import Room, Settings
from .stats import Origin, Stats

__all__ = [
    "AsyncEngine", "Depth", "Engine", "Event", "FinishReason", "Handle", "Origin", "Request", "Room", "Settings",
    "Stats", "TokenLogprobs",
]  # fmt: skip
