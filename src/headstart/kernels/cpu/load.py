"""The compiled extension, if this machine has it."""

import importlib.machinery
import importlib.util
import logging
import os
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx

from ...host import available_cores
from ..setting import VARIABLE, stock_forced

LOG = logging.getLogger("headstart")


@dataclass(frozen=True)
class Loaded:
    """The extension, or why there is none."""

    module: Any
    reason: str | None = None

    def __str__(self) -> str:
        return self.reason or f"native ({self.module.isa()}, {self.module.threads()} threads)"


_loaded: Loaded | None = None
_lock = threading.Lock()


def loaded() -> Loaded:
    """Load the extension, compiled first if need be. Log once why there is none."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
            if _loaded.reason and not os.environ.get(VARIABLE):
                LOG.warning("CPU kernels are off, so decoding is several times slower: %s", _loaded.reason)
    return _loaded


def _load() -> Loaded:
    if stock_forced():
        return Loaded(None, f"stock ({VARIABLE}=stock)")
    try:
        from . import build  # needs nanobind

        module = open_module(str(build.extension()))
    except Exception as error:  # whatever is wrong with a compiler or a folder, stock ops compute the same
        return Loaded(None, f"stock ({error})")
    module.set_threads(available_cores())
    return Loaded(module)


def open_module(path: str) -> ModuleType:
    """Import the extension from a file."""
    loader = importlib.machinery.ExtensionFileLoader("headstart_cpu", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def check_build(path: str) -> None:
    """Compute something with a new build, in a process that may crash."""
    mx.set_default_device(mx.cpu)
    x, weight = mx.ones((2, 40), mx.bfloat16), mx.full((3, 40), 0.5, mx.bfloat16)
    (out,) = open_module(path).products(x, [(weight, None, None, 0, 0, None, None)])
    assert out.tolist() == [[20.0] * 3] * 2, "error: the build computes something else"
