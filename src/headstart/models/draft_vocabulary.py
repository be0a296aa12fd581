"""A part of the vocabulary for drafts.

Scoring all tokens is most of what a draft costs where the vocabulary is large. A draft needs the likely ones only:
the trunk verifies with all of them, so a token that is left out costs a draft and never changes the text.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    ids: mx.array  # [R] int32
    lm_head: nn.Module  # the rows of these ids
    origin: str  # how they were chosen
    tokens: frozenset[int]  # the ids, for the host

    @classmethod
    def of(cls, lm_head: nn.Module, ids: list[int], origin: str) -> "DraftVocabulary":
        """Gather the rows of an output layer or a tied embedding, quantised or not."""
        index, rows = mx.array(ids, mx.int32), copy(lm_head)
        for name, array in lm_head.parameters().items():
            rows[name] = mx.contiguous(array[index])
        mx.eval(index, rows.parameters())
        return cls(index, rows, origin, frozenset(ids))

    def count(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return how many of the tokens are in it, and how many there are."""
        return sum(token in self.tokens for token in tokens), len(tokens)

    def full(self, logits: mx.array, vocabulary: int) -> mx.array:
        """Return logits [B, W, R] as [B, W, V]: the tokens that are left out cannot be drawn."""
        everything = mx.full((*logits.shape[:2], vocabulary), -mx.inf, mx.float32)
        ids = mx.broadcast_to(self.ids, logits.shape)
        return mx.put_along_axis(everything, ids, logits.astype(mx.float32), axis=-1)
