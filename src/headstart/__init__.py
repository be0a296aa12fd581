"""Headstart: decode with a model's own multi-token-prediction head, without changing a token."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from . import errors, open_files

if TYPE_CHECKING:
    from .engine import AsyncEngine, Engine, EngineThread, Event, Request, Stats
    from .library import (
        BatchResponse,
        GenerationResponse,
        PromptCache,
        batch_generate,
        generate,
        load,
        make_prompt_cache,
        make_sampler,
        stream_generate,
    )
    from .sampling_params import GrammarSpec, SamplingParams
    from .state import PrefixCache

    __version__: str

open_files.protect()

__all__ = [
    "AsyncEngine", "BatchResponse", "Engine", "EngineThread", "Event", "GenerationResponse", "GrammarSpec",
    "PrefixCache", "PromptCache", "Request", "SamplingParams", "Stats", "__version__", "batch_generate", "errors",
    "generate", "load", "make_prompt_cache", "make_sampler", "stream_generate",
]  # fmt: skip

# mlx and mlx-lm take seconds to import, so a name is looked up when it is first used, in the lightest module first.
_MODULES = ("sampling_params", "state", "engine", "library")


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _import_module("importlib.metadata").version("headstart")
    for module in _MODULES if name in __all__ else ():
        found = _import_module(f".{module}", __name__)
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
