"""Products on a CPU, on all of its cores.

mlx works off a stream of operations in one thread, and so on one core. A matrix can be taken apart by its outputs, a
part to a stream: each is summed as before, so that no bit changes.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import mlx.core as mx

LEAST = 2**17  # multiplications that are worth waking another core for
UNIT = 16  # outputs that mlx's product works on together
MOST = 16  # cores


def spread(x: mx.array, weights: Sequence[mx.array], inputs: int, multiply: Callable[..., mx.array]) -> mx.array:
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
    """Those that this process may use for products. Apple's own products use several as they are."""
    if sys.platform == "darwin":
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST)


@cache
def others() -> list[mx.ThreadLocalStream]:
    """A stream for every core but the first."""
    return [mx.new_thread_local_stream(mx.cpu) for _ in range(cores() - 1)]
