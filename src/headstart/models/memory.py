"""What the device has of memory, and what a sequence takes of it."""

import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ..errors import HeadstartError
from ..state import BLOCK, KV, OneSequence
from .model import Model

VARIABLE = "HEADSTART_MEMORY_GB"
WORKING_SET = "max_recommended_working_set_size"  # what Metal calls its memory
DRIVERS = "free_memory"  # that CUDA's driver has left
# Pages of vm_stat that macOS can give out at once: unused ones, copies of files, and what programs gave back.
AVAILABLE = ("Pages free", "File-backed pages", "Pages purgeable")
SHARE = 0.9  # of the memory beside the weights that sequences may take: steps need some of it

# Under /sys/fs/cgroup, of version 2 and 1: the limit, what is used, and of that the files that the kernel can drop.
GROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


@dataclass(frozen=True)
class Footprint:
    """The bytes that a sequence takes: a fixed part, and one per position of KV cache."""

    fixed: int
    position: int
    scores: int = 0  # per position of the longest sequence, while a chunk of a prompt attends to it
    tower: int = 0  # while an image is in the vision tower
    reading: int = 0  # while a prompt is read, beside the scores

    @classmethod
    def of(cls, model: Model) -> "Footprint":
        states = [model.make_state(1), *([model.make_head_state(1)] if model.has_head else [])]
        layers = [layer for state in states for layer in state.layers]
        kv = [layer for layer in layers if isinstance(layer, KV)]
        fixed = sum(array.nbytes for layer in layers if not isinstance(layer, KV) for array in layer.arrays())
        alone = [layer for layer in layers if isinstance(layer, OneSequence)]
        fixed += sum(layer.fixed_bytes for layer in alone)
        arrays = [(layer.every, array) for layer in kv for array in layer.arrays()]  # [1, H, 0, D]
        position = -(-sum(BLOCK // every * a.shape[1] * a.shape[3] * a.itemsize for every, a in arrays) // BLOCK)
        position += sum(layer.position_bytes for layer in alone)
        held = model.backend.copies_held(model.layers, model.dtype, eight_bits=model.eight_bit_kv)
        fixed, position = held[0] * fixed, held[1] * position
        # Metal's fused attention has no heads this wide: scores are an array before softmax, and another after it.
        heads = int(model.config.get("num_attention_heads", 0)) if WORKING_SET in mx.device_info() else 0
        tower = model.tower.working_bytes(model.dtype.size) if model.tower is not None else 0
        reading = model.reading.backend.pass_bytes(model.layers, model.dtype)
        return cls(fixed, position, 2 * heads * model.reading.backend.scored * model.dtype.size, tower, reading)

    def bytes(self, lengths: Sequence[int]) -> int:
        """Return the memory of sequences of these lengths. All get the capacity of the longest."""
        capacity = -(-max(lengths, default=0) // BLOCK) * BLOCK
        return len(lengths) * (self.fixed + self.position * capacity) + self.scores * capacity + self.working

    @property
    def working(self) -> int:
        """Return the memory of what is under way beside a step, of whatever length."""
        return self.tower + self.reading

    def longest(self, available: int, rows: int) -> int:
        """Return how long so many sequences may be in what is `available`, 0 or less if none fits."""
        positions = (available - self.working - rows * self.fixed) // max(rows * self.position + self.scores, 1)
        return positions // BLOCK * BLOCK


def ask_system(*command: str) -> str:
    """Return what a command of macOS prints; nothing where there is no such command, or it fails."""
    if platform.system() != "Darwin":
        return ""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def available_on_mac(ask: Callable[..., str] = ask_system) -> int | None:
    """Return the bytes that macOS can give out without compressing or swapping what programs hold; None elsewhere."""
    said = ask("vm_stat")
    size = re.search(r"page size of (\d+) bytes", said)
    pages = re.findall(rf"(?:{'|'.join(AVAILABLE)}):\s+(\d+)", said)
    return int(size[1]) * sum(map(int, pages)) if size else None


def unused(ask: Callable[..., str] = ask_system) -> int:
    """Return the bytes of the device's memory that this process can still take.

    Other processes count: on CUDA by what the driver says is free, elsewhere by what the system can give out. Metal
    recommends a working set for one process, which is never exceeded. HEADSTART_MEMORY_GB replaces all of that.
    """
    if limit := os.environ.get(VARIABLE):
        try:
            if (most := int(float(limit) * 1e9)) < 0:
                raise ValueError
            return max(0, most - mx.get_active_memory())
        except (ValueError, OverflowError) as error:
            raise HeadstartError(f"{VARIABLE} is {limit!r}; set it to a number of gigabytes") from error
    info = mx.device_info()
    total = info.get(WORKING_SET) or info.get("total_memory")
    free = available_on_mac(ask) or total if WORKING_SET in info else info.get(DRIVERS, total)
    if total is None or free is None:
        total, free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), available_on_host()
    # Buffers that MLX keeps for its next arrays are taken in the system's eyes.
    return max(0, min(int(total) - mx.get_active_memory(), int(free) + mx.get_cache_memory()))


def system_share() -> str:
    """Return what macOS keeps of the memory for itself, or other programs hold, as a remark on `unused`; elsewhere
    nothing."""
    info = mx.device_info()
    if WORKING_SET not in info or os.environ.get(VARIABLE):
        return ""
    working, total = int(info[WORKING_SET]), int(info["memory_size"])
    if unused() + mx.get_active_memory() < working:
        return f" (other programs hold much of this machine's {total / 1e9:.2f} GB: close some)"
    return (
        f" (macOS lets a GPU use {working / 1e9:.2f} of this machine's {total / 1e9:.2f} GB; "
        "`sudo sysctl iogpu.wired_limit_mb=MB` moves that limit)"
    )


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
