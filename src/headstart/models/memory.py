"""What the device has of memory."""

import os
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

# Under /sys/fs/cgroup, of version 2 and 1: the limit, what is used, and of that the files that the kernel can drop.
GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def unused() -> int:
    """Return the bytes of the device's memory that this process can still take.

    Other processes count where the system says what they take: on CUDA the driver, on a CPU under Linux the kernel.
    Metal recommends a working set for one process, whatever others do.
    """
    info = mx.device_info()
    total = info.get("max_recommended_working_set_size") or info.get("total_memory")
    free = info.get("free_memory", total)
    if total is None or free is None:
        total, free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), available_on_host()
    # Buffers that MLX keeps for its next arrays are taken in the system's eyes.
    return max(0, min(int(total) - mx.get_active_memory(), int(free) + mx.get_cache_memory()))


def available_on_host(root: Path = Path("/")) -> int:
    """Return the bytes that the host, and the container this runs in, can give out without swapping."""
    left = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):  # not Linux
        left.append(_number(root / "proc/meminfo", "MemAvailable:") * 1024)
    for limit, used, stat, files in GROUPS:
        group = root / "sys/fs/cgroup"
        with suppress(OSError, ValueError):  # no container, or "max"
            most = int((group / limit).read_text())
            left.append(most - int((group / used).read_text()) + _number(group / stat, files))
    return max(0, min(left))


def _number(file: Path, name: str) -> int:
    """Return the number behind `name` in a file of one name per line."""
    for line in file.read_text().splitlines():
        first, *rest = line.split()
        if first == name:
            return int(rest[0])
    raise ValueError(f"{file} has no {name}")
