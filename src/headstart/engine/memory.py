"""Estimate the device memory that sequences need, and recognise when it runs out."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OutOfMemory
from ..models import Model
from ..models.memory import unused
from ..state import BLOCK, KV

SHARE = 0.9  # of the memory beside the weights that sequences may take: steps need some of it
MAX_PREFIX_CACHE = 2_000_000_000  # bytes of the prefix cache by default, at most a quarter of what is available
ANSWER = 4096  # tokens of an answer counted at admission; longer ones find memory as they grow, or are requeued
MESSAGES = ("out of memory", "unable to allocate", "bad_alloc", "insufficient memory")


@dataclass(frozen=True)
class Footprint:
    """The bytes that a sequence takes: a fixed part, and one per position of KV cache."""

    fixed: int
    position: int

    @classmethod
    def of(cls, model: Model) -> "Footprint":
        states = [model.make_state(1), *([model.make_head_state(1)] if model.has_head else [])]
        layers = [layer for state in states for layer in state.layers]
        kv = [layer for layer in layers if isinstance(layer, KV)]
        fixed = sum(array.nbytes for layer in layers if not isinstance(layer, KV) for array in layer.arrays())
        arrays = [array for layer in kv for array in layer.arrays()]  # [1, H, 0, D]
        return cls(fixed, sum(array.shape[1] * array.shape[3] * array.itemsize for array in arrays))

    def bytes(self, lengths: Sequence[int]) -> int:
        """Return the memory of sequences of these lengths. All get the capacity of the longest."""
        capacity = -(-max(lengths, default=0) // BLOCK) * BLOCK
        return len(lengths) * (self.fixed + self.position * capacity)


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
