"""When a persistent kernel may run: its blocks wait for each other, so all of them must be resident.

One block per multiprocessor is, if no second such kernel holds some of them. So only one thread, which is one stream,
launches them; in that stream each takes the `status` of the one before as an input, which orders them. A barrier that
is not passed in time sets the status: the step is computed again, and from then on by separate kernels.
"""

import logging
import threading
from threading import Thread, current_thread

import mlx.core as mx

from .compiler import ROOM
from .device import resident_blocks

LOG = logging.getLogger("headstart")
SHARED_BYTES = 227 * 1024  # of a block, at most
STATUS = ROOM // 4  # numbers, of which the first counts: a smaller array would be a part of one


class _OfThread(threading.local):
    """Hold the status of one thread. Other threads cannot evaluate it, least of all while a graph is traced."""

    def __init__(self) -> None:
        self.status = _passed()


class Persistent:
    """What all launches of a process share."""

    def __init__(self) -> None:
        self._of_thread = _OfThread()
        self.launched = False
        self.refusal: str | None = None  # why none is launched any more
        self._owner: Thread | None = None

    @property
    def status(self) -> mx.array:
        """Return the status that this thread's last launch left; its first element is 1 where a barrier failed."""
        return self._of_thread.status

    @status.setter
    def status(self, status: mx.array) -> None:
        self._of_thread.status = status

    def claim(self) -> bool:
        """Return whether this thread may launch persistent kernels: the first that asks, until it ends or releases
        them."""
        if self.refusal is not None or not resident_blocks(SHARED_BYTES):
            return False
        if self._owner is None or not self._owner.is_alive():
            self._owner = current_thread()
        return self._owner is current_thread()

    def own_status(self) -> mx.array | None:
        """Return the status of the last launch if it was this thread's."""
        return self.status if self.launched and self._owner is current_thread() else None

    def release(self) -> None:
        """Let another thread launch them, if this one did, once all that it launched has been computed."""
        if self._owner is current_thread():
            mx.synchronize()
            self.status = _passed()
            self._owner = None

    def give_up(self, reason: str) -> None:
        """Launch none from now on."""
        LOG.error("%s: decoder layers are computed by separate kernels from now on", reason)
        self.refusal, self.launched = reason, False
        self._of_thread = _OfThread()


def _passed() -> mx.array:
    return mx.array([0] * STATUS, mx.int32)  # computed already
