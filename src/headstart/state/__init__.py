"""State of sequences: KV caches, recurrent states, what of them is committed, and the prefix cache."""

from .batch_state import BatchState
from .kv import BLOCK, KV, TokenPositions
from .prefix import CHUNK, PrefixCache, PrefixStats
from .recurrent import Pending, Recurrent

__all__ = [
    "BLOCK",
    "CHUNK",
    "KV",
    "BatchState",
    "Pending",
    "PrefixCache",
    "PrefixStats",
    "Recurrent",
    "TokenPositions",
]
