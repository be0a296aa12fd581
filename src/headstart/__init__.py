"""Headstart: decode with a model's own multi-token-prediction head, without changing a token."""

from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from . import errors, open_files

if TYPE_CHECKING:
    from .engine import AsyncEngine, Engine, Event, Request, Stats
    from .library import (
        BatchResponse,
        GenerationResponse,
        batch_generate,
        generate,
        load,
        make_sampler,
        stream_generate,
    )
    from .sampling import GrammarSpec, SamplingParams
    from .state import Prefix

__version__ = _version("headstart")

open_files.protect()

__all__ = [
    "AsyncEngine",
    "BatchResponse",
    "Engine",
    "Event",
    "GenerationResponse",
    "GrammarSpec",
    "Prefix",
    "Request",
    "SamplingParams",
    "Stats",
    "__version__",
    "batch_generate",
    "errors",
    "generate",
    "load",
    "make_sampler",
    "stream_generate",
]

# mlx and mlx-lm take seconds to import: they wait until a name that needs them is asked for.
_HOMES = {
    "AsyncEngine": "engine",
    "BatchResponse": "library",
    "Engine": "engine",
    "Event": "engine",
    "GenerationResponse": "library",
    "GrammarSpec": "sampling",
    "Prefix": "state",
    "Request": "engine",
    "SamplingParams": "sampling",
    "Stats": "engine",
    "batch_generate": "library",
    "generate": "library",
    "load": "library",
    "make_sampler": "library",
    "stream_generate": "library",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
