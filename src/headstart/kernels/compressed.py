"""DeepSeek-V4's attention, as backends take it; `layers.py` describes the others."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..state import KV, Recurrent


@dataclass(frozen=True, eq=False)
class CompressedAttention:
    """Attention to a window of tokens and to entries, each of which is made of a block of tokens.

    All heads share one key, which is also the value. Its last numbers are rotated, and rotated back in the output. An
    entry is a mean of its block's tokens, each number by weights of its own. Where blocks overlap, a token has one
    such number for its own block and one for the next.
    """

    module: nn.Module
    heads: int
    groups: int  # of heads, that the output projects each by itself
    window: int  # tokens that a token sees, itself among them
    every: int = 0  # tokens of a block; 0: there are no entries
    overlaps: bool = False
    budget: int | None = None  # entries that an index selects for a token; None: all

    @property
    def indexer(self) -> nn.Module | None:
        return self.module.compressor.get("indexer") if self.every else None

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return the numbers of a key that are not rotated, and that are."""
        rotated: int = self.module.rope.dims
        return self.module.head_dim - rotated, rotated

    @property
    def index_size(self) -> int:
        """Return the numbers of an entry's key for the index, 0 without one."""
        return 0 if self.indexer is None else int(self.indexer.head_dim)

    @property
    def memories(self) -> int:
        """Return how many it has: of tokens; then of entries, and of the tokens of blocks that are not whole."""
        return 3 if self.every else 1

    @property
    def before(self) -> int:
        """Return how many tokens before a window its entries may depend on."""
        return (1 + self.overlaps) * self.every - 1

    def state(self, rows: int, dtype: mx.Dtype, eight_bits: bool) -> list[KV | Recurrent]:
        size, rotated = self.head_sizes
        tokens = KV.empty(rows, 1, size, dtype, rotated, eight_bits=eight_bits)
        if not self.every:
            return [tokens]
        index = [(self.index_size, dtype)] if self.indexer is not None else []
        entries = KV.empty(rows, 1, size, dtype, rotated, eight_bits=eight_bits, index=index, every=self.every)
        channels = (1 + self.overlaps) * (size + rotated + self.index_size)
        numbers, weights = (mx.zeros((rows, self.before, channels), dtype) for _ in range(2))
        return [tokens, entries, Recurrent(numbers, weights)]
