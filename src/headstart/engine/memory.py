"""Divide the device's memory between sequences and prefixes, and keep weights in it."""

import atexit
import os
import weakref
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..error_log import LOG
from ..models import Model
from ..models.memory import DRIVERS, SHARE, WORKING_SET, unused

WIRED = "HEADSTART_WIRED"
WIRED_SHARE = 0.6  # of the machine's memory: macOS and other programs need the rest
MARGIN = 1.1  # of the weights: the states of a few sequences

MAX_PREFIX_CACHE = 2_000_000_000  # bytes of the prefix cache by default, at most a quarter of what is available
ANSWER = 4096  # tokens of an answer counted at admission; longer ones find memory as they grow, or are requeued


def memory_for_sequences() -> int:
    """Return the bytes that sequences may take beside what is in memory now."""
    if DRIVERS in mx.device_info():
        # CUDA's pool keeps what MLX frees, and the driver counts it as taken, until a stream is waited for.
        mx.clear_cache()
        mx.synchronize()
    return int(SHARE * unused())


def memory_for_prefixes() -> int:
    """Return the default size of the prefix cache."""
    return min(MAX_PREFIX_CACHE, memory_for_sequences() // 4)


_wired: weakref.WeakSet[Model] = weakref.WeakSet()


def wire_weights(model: Model) -> None:
    """Have macOS keep a model's weights where they are as long as the model lives, if HEADSTART_WIRED=1 asks for it.

    By default nothing is wired: macOS can panic when a process that has wired memory frees and takes buffers
    (mlx#3186).
    """
    if os.environ.get(WIRED) != "1" or WORKING_SET not in mx.device_info() or model in _wired:
        return
    if not _wired:
        LOG.warning("%s=1 keeps weights wired: macOS may panic when memory is short (mlx#3186)", WIRED)
        atexit.register(mx.set_wired_limit, 0)
    _wired.add(model)
    weakref.finalize(model, _set_wired_limit).atexit = False
    _set_wired_limit()


def _set_wired_limit() -> None:
    """Wire the weights of all models that asked for it, or nothing if too little of the machine's memory is left."""
    info, limit = mx.device_info(), int(MARGIN * sum(map(_weights_nbytes, _wired)))
    most = min(int(info[WORKING_SET]), int(WIRED_SHARE * int(info["memory_size"])))
    if limit > most:
        LOG.warning("weights are not wired: %.2f GB of %.2f GB would be", limit / 1e9, int(info["memory_size"]) / 1e9)
    mx.set_wired_limit(limit if limit <= most else 0)


def _weights_nbytes(model: Model) -> int:
    parts = [model.weights, model.tower, model.drafter.weights if model.drafter is not None else None]
    flat: Any = [pair for part in parts if part is not None for pair in tree_flatten(part.parameters())]
    return sum(array.nbytes for _, array in flat)
