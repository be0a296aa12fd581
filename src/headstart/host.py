"""The machine that this process runs on."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: a container may have the time of fewer than it sees."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        time, period = quota.read_text().split()
        return max(1, min(seen, -(-int(time) // int(period))))
    except (OSError, ValueError):  # no container, or "max"
        return seen


def give_back_memory() -> None:
    """Give memory that was freed back to the system, where the C library is glibc, which keeps it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
