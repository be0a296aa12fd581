"""One batched loop: `step.py` is its body, `engine.py` what keeps it turning."""

from .engine import DEFAULT_K, Engine
from .request import Event, FinishReason, Handle, Request, TokenLogprobs
from .stats import Origin, Stats

__all__ = ["DEFAULT_K", "Engine", "Event", "FinishReason", "Handle", "Origin", "Request", "Stats", "TokenLogprobs"]
