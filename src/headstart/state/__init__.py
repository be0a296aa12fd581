"""What a sequence remembers: keys and values, recurrent states, which of it is certain, and what outlives it."""

from .kv import BLOCK, KV
from .prefix import CHUNK, Prefix, PrefixStats
from .recurrent import Pending, Recurrent
from .rows import Rows

__all__ = ["BLOCK", "CHUNK", "KV", "Pending", "Prefix", "PrefixStats", "Recurrent", "Rows"]
