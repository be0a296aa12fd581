"""The compiled extension, if this machine has it: every kernel asks here first and else takes stock ops."""

import importlib.machinery
import importlib.util
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from ...errors import HeadstartError

VARIABLE = "HEADSTART_KERNELS"
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


def native() -> Any:
    """Return the extension where arrays are computed on a CPU that has it, else None."""
    if mx.default_device() != mx.cpu:
        return None
    return (_loaded or loaded()).module


def loaded() -> Loaded:
    """Load the extension, compiled first if need be. Where the CPU computes, log once why there is none."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
            if _loaded.reason and not os.environ.get(VARIABLE) and mx.default_device() == mx.cpu:
                LOG.warning("CPU kernels are off, so decoding is several times slower: %s", _loaded.reason)
    return _loaded


def stock_forced() -> bool:
    """Return whether the user wants stock ops only."""
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in ("", "auto", "stock"):
        raise HeadstartError(f"{VARIABLE} is {choice!r}; set it to 'auto' or 'stock'")
    return choice == "stock"


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


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: a container may have the time of fewer than it sees."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text().split()
        return max(1, min(seen, -(-int(time) // int(period))))
    except (OSError, ValueError):  # no container, or "max"
        return seen


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
    (out,) = open_module(path).products(x, [(weight, None, None, 0, 0, None)])
    assert out.tolist() == [[20.0] * 3] * 2, "error: the build computes something else"
