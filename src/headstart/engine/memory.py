"""What rows will need of the device's memory, counted before they are let in."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import OutOfMemory
from ..models import Model
from ..models.memory import unused
from ..state import BLOCK, KV

SHARE = 0.9  # of what weights leave: steps need some room of their own
PREFIXES = 2_000_000_000  # bytes for beginnings of prompts, at most a quarter of what there is
ANSWER = 4096  # tokens of an answer that are counted ahead; longer ones find room as they grow, or wait


@dataclass(frozen=True)
class Footprint:
    """What a row of a model takes: a fixed part, and one for each position up to the longest row's."""

    fixed: int
    position: int

    @classmethod
    def of(cls, model: Model) -> "Footprint":
        states = [model.make_state(1), *([model.make_head_state(1)] if model.has_head else [])]
        layers = [layer for state in states for layer in state.layers]
        kv = [layer for layer in layers if isinstance(layer, KV)]
        fixed = sum(array.nbytes for layer in layers if not isinstance(layer, KV) for array in layer.arrays())
        return cls(fixed, sum(2 * layer.keys.shape[1] * layer.keys.shape[3] * layer.keys.itemsize for layer in kv))

    def bytes(self, lengths: Sequence[int]) -> int:
        """Of rows that are to hold so many tokens each: all have the capacity of the longest."""
        capacity = -(-max(lengths, default=0) // BLOCK) * BLOCK
        return len(lengths) * (self.fixed + self.position * capacity)


def memory_for_sequences() -> int:
    """Bytes that rows may take beside what is in memory now, the weights above all."""
    return int(SHARE * unused())


def memory_for_prefixes() -> int:
    """Bytes that the prefix cache may take of them, where the user does not say."""
    return min(PREFIXES, memory_for_sequences() // 4)


def shortage(error: BaseException) -> OutOfMemory:
    """What is said to the request that had to end for it."""
    return OutOfMemory(
        "memory ran out, and this request, the youngest, was ended so that others could go on: ask again, or serve "
        f"with fewer --max-sequences or a smaller --prefix-cache-gb ({type(error).__name__}: {error})"
    )


def is_shortage(error: BaseException) -> bool:
    """Does this failure mean that memory ran out? mlx says so in words only."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(
        said in words for said in ("out of memory", "unable to allocate", "bad_alloc", "insufficient memory")
    )
