"""One batched loop: `step.py` is its body, `engine.py` what keeps it turning."""

from .async_engine import AsyncEngine
from .depth import DepthController
from .engine import Engine
from .engine_thread import EngineThread, Settings
from .request import Event, FinishReason, Handle, Request, TokenLogprobs
from .stats import Origin, Stats

__all__ = [
    "AsyncEngine",
    "DepthController",
    "Engine",
    "EngineThread",
    "Event",
    "FinishReason",
    "Handle",
    "Origin",
    "Request",
    "Settings",
    "Stats",
    "TokenLogprobs",
]  # fmt: skip
