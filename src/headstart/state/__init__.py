"""What a sequence remembers: keys and values, recurrent states, and which of it is certain."""

from .kv import BLOCK, KV
from .recurrent import Pending, Recurrent
from .rows import Rows

__all__ = ["BLOCK", "KV", "Pending", "Recurrent", "Rows"]
