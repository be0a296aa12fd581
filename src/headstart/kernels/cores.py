"""Products on a CPU, on all of its cores.

mlx works off a stream of operations in one thread, and so on one core. A matrix can be taken apart by its outputs, a
part to a stream: each is summed as before, so that no bit changes.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from pathlib import Path

import mlx.core as mx

LEAST = 2**17  # multiplications that are worth waking another core for
UNIT = 16  # outputs that mlx's product works on together
MOST = 16  # cores


def on_all_cores(
    x: mx.array, weights: Sequence[mx.array], inputs: int, multiply: Callable[..., mx.array]
) -> mx.array:
    """`multiply(x, *weights)`, [..., K] by [N, K] → [..., N]; a row of every one of the weights is an output's."""
    outputs, count = weights[0].shape[0], 1
    if mx.default_device() == mx.cpu:
        count = min(cores(), prod(x.shape[:-1]) * inputs * outputs // LEAST)
    if count < 2:
        return multiply(x, *weights)
    cuts = sorted({outputs * part // count // UNIT * UNIT for part in range(1, count)} - {0})
    parts = zip(*(mx.split(array, cuts) for array in weights), strict=True)
    made = []
    for stream, part in zip((None, *others()), parts, strict=False):
        with mx.stream(stream or mx.cpu):
            made.append(multiply(x, *part))
    return mx.concatenate(made, axis=-1)


@cache
def cores() -> int:
    """How many products are spread over. Apple's own use several as they are."""
    return 1 if sys.platform == "darwin" else min(available(), MOST)


def available(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores that this process may use: a container may have the time of fewer than it sees."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text().split()
        return max(1, min(seen, -(-int(time) // int(period))))
    except (OSError, ValueError):  # no container, or "max"
        return seen


@cache
def others() -> list[mx.ThreadLocalStream]:
    """A stream for every core but the first."""
    return [mx.new_thread_local_stream(mx.cpu) for _ in range(cores() - 1)]
