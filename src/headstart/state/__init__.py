"""What a sequence remembers: keys and values, recurrent states, which of it is certain, and what outlives it."""

from .batch_state import BatchState
from .kv import BLOCK, KV
from .prefix import CHUNK, Prefix, PrefixStats
from .recurrent import Pending, Recurrent

__all__ = ["BLOCK", "CHUNK", "KV", "BatchState", "Pending", "Prefix", "PrefixStats", "Recurrent"]
