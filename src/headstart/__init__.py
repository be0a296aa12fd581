"""Headstart: decode with a model's own multi-token-prediction head, without changing a token."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from . import errors, open_files

if TYPE_CHECKING:
    from .engine import Engine, Request
    from .library import generate, load, make_sampler, stream_generate
    from .sampling import GrammarSpec, SamplingParams
    from .state import Prefix

__version__ = version("headstart")

open_files.protect()

__all__ = [
    "Engine",
    "GrammarSpec",
    "Prefix",
    "Request",
    "SamplingParams",
    "__version__",
    "errors",
    "generate",
    "load",
    "make_sampler",
    "stream_generate",
]

# mlx and mlx-lm take seconds to import: they wait until a name that needs them is asked for.
_HOMES = {
    "Engine": "engine",
    "GrammarSpec": "sampling",
    "Prefix": "state",
    "Request": "engine",
    "SamplingParams": "sampling",
    "generate": "library",
    "load": "library",
    "make_sampler": "library",
    "stream_generate": "library",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
