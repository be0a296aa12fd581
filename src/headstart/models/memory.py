"""What the device has of memory."""

import os
from pathlib import Path

import mlx.core as mx


def unused() -> int:
    """Bytes of the device's memory that nothing of this process takes."""
    info = mx.device_info()
    most = info.get("max_recommended_working_set_size") or info.get("total_memory") or _installed()
    return max(0, int(most) - mx.get_active_memory())


def _installed(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """What the machine has, or a container of it."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(pages, int(limit.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return pages
