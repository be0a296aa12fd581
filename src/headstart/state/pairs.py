"""Pairs that a head has not seen."""

from typing import NamedTuple

import mlx.core as mx


class UnseenPairs(NamedTuple):
    """Committed pairs (hidden state of position t, token t+1) that the head has not seen: `counts[b]` of sequence b.

    The pairs of a sequence are on the left; what is to their right is padding.
    """

    hidden: mx.array  # [B, T, H]
    tokens: mx.array  # [B, T]
    counts: mx.array  # [B]

    @classmethod
    def empty(cls, rows: int, hidden_size: int, dtype: mx.Dtype) -> "UnseenPairs":
        hidden = mx.zeros((rows, 0, hidden_size), dtype)
        return cls(hidden, mx.zeros((rows, 0), mx.int32), mx.zeros((rows,), mx.int32))

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    def extend(self, hidden: mx.array, tokens: mx.array, counts: mx.array) -> "UnseenPairs":
        """Append the first `counts[b]` of these pairs to those of each sequence."""
        if self.width == 0:
            return UnseenPairs(hidden, tokens, counts)
        padded = self.pad(self.width + tokens.shape[1])
        at = self.counts[:, None] + mx.arange(tokens.shape[1])  # [B, W]
        return UnseenPairs(
            mx.put_along_axis(padded.hidden, at[..., None], hidden, axis=1),
            mx.put_along_axis(padded.tokens, at, tokens, axis=1),
            self.counts + counts,
        )

    def latest(self, most: int) -> "UnseenPairs":
        """Return the last pairs of every sequence, at most `most` each."""
        if self.width <= most:
            return self
        if not most:
            return UnseenPairs(self.hidden[:, :0], self.tokens[:, :0], mx.zeros_like(self.counts))
        at = mx.maximum(self.counts - most, 0)[:, None] + mx.arange(most)  # [B, most]
        return UnseenPairs(
            mx.take_along_axis(self.hidden, at[..., None], axis=1),
            mx.take_along_axis(self.tokens, at, axis=1),
            mx.minimum(self.counts, most),
        )

    def following(self, drafts: mx.array, distance: int) -> mx.array:
        """Return the tokens [B, T] that are `distance` further on: after the last pair's come `drafts` [B, j], at
        most `distance` of them, then undefined ones."""
        if not distance:
            return self.tokens
        tokens = mx.pad(self.tokens, [(0, 0), (0, distance)])
        if drafts.shape[1]:
            at = self.counts[:, None] + mx.arange(drafts.shape[1])  # [B, j]
            tokens = mx.put_along_axis(tokens, at, drafts, axis=1)
        return tokens[:, distance:]

    def pad(self, width: int) -> "UnseenPairs":
        more = width - self.width
        hidden = mx.pad(self.hidden, [(0, 0), (0, more), (0, 0)])
        return UnseenPairs(hidden, mx.pad(self.tokens, [(0, 0), (0, more)]), self.counts)

    def join(self, other: "UnseenPairs") -> "UnseenPairs":
        """Return the pairs of both batches' sequences."""
        width = max(self.width, other.width)
        fields = zip(self.pad(width), other.pad(width), strict=True)
        return UnseenPairs(*[mx.concatenate(list(pair)) for pair in fields])
