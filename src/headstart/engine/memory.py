"""Divide the device's memory between sequences and prefixes, and recognise when it runs out."""

from ..errors import OutOfMemory
from ..models.memory import SHARE, unused

MAX_PREFIX_CACHE = 2_000_000_000  # bytes of the prefix cache by default, at most a quarter of what is available
ANSWER = 4096  # tokens of an answer counted at admission; longer ones find memory as they grow, or are requeued
MESSAGES = (
    "out of memory",
    "unable to allocate",
    "bad_alloc",
    "insufficient memory",
    "greater than the maximum allowed buffer size",  # Metal
)


def memory_for_sequences() -> int:
    """Return the bytes that sequences may take beside what is in memory now."""
    return int(SHARE * unused())


def memory_for_prefixes() -> int:
    """Return the default size of the prefix cache."""
    return min(MAX_PREFIX_CACHE, memory_for_sequences() // 4)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. MLX raises a RuntimeError for that, so its message has to tell."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(message in text for message in MESSAGES)


def out_of_memory(error: BaseException) -> OutOfMemory:
    """Return the error of the request that was ended to free memory."""
    return OutOfMemory(
        "memory ran out, and this request, the youngest, was ended so that others could go on: try again, or serve "
        f"with fewer --max-sequences or a smaller --prefix-cache-gb ({type(error).__name__}: {error})"
    )
