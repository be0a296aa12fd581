"""Batched speculative decoding: `step.py` is one step, `engine.py` the loop around it."""

from .depth import DepthController
from .device_thread import DeviceThread
from .engine import Engine
from .engine_thread import AsyncEngine, EngineThread, Settings
from .images import PromptImage, insert_images
from .request import Event, FinishReason, Handle, Request, TokenLogprobs
from .stats import Origin, Stats

__all__ = [
    "AsyncEngine", "DepthController", "DeviceThread", "Engine", "EngineThread", "Event", "FinishReason", "Handle",
    "Origin", "PromptImage", "Request", "Settings", "Stats", "TokenLogprobs", "insert_images",
]  # fmt: skip
