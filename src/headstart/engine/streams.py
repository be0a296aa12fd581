"""Streams of MLX for engines that any thread may run.

Only the thread that made an ordinary stream can evaluate what was queued on it. These can be used by any thread, by
one at a time, and are never freed: an engine that has no work leaves its stream to others.
"""

from collections import defaultdict
from weakref import finalize

import mlx.core as mx

_idle: defaultdict[str, list[mx.Stream]] = defaultdict(list)  # by device


class BorrowedStream:
    """A stream of the default device that is its owner's until it is given back, or the owner is gone."""

    def __init__(self, owner: object):
        device = mx.default_device()
        idle = _idle[str(device)]
        try:
            self.stream = idle.pop()
        except IndexError:
            self.stream = mx.new_thread_unsafe_stream(device)
        self.give_back = finalize(owner, idle.append, self.stream)
        self.give_back.atexit = False
