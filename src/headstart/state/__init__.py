"""State of sequences: KV caches, recurrent states, what of them is committed, and the prefix cache."""

from .batch_state import BatchState
from .disk_prefix import DiskPrefix
from .foreign import Arrays, OneSequence
from .kv import BLOCK, GROUP, KV, TokenPositions
from .pairs import UnseenPairs
from .prefix import CHUNK, Chunks, PrefixCache, PrefixStats
from .recurrent import Recurrent

__all__ = [
    "BLOCK", "CHUNK", "GROUP", "KV", "Arrays", "BatchState", "Chunks", "DiskPrefix", "OneSequence", "PrefixCache",
    "PrefixStats", "Recurrent", "TokenPositions", "UnseenPairs",
]  # fmt: skip
