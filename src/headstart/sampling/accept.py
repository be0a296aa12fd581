"""Which drafts stand, and what comes after them. Pure functions of what the model would do at each position."""

from typing import NamedTuple

import mlx.core as mx


class Verdict(NamedTuple):
    accepted: mx.array  # [B] int32, n
    tokens: mx.array  # [B, k+1] int32: n accepted drafts, the model's own next token, then nothing of meaning
    next: mx.array  # [B] int32, the token at index n


def greedy(target: mx.array, drafts: mx.array, allowed: mx.array) -> Verdict:
    """Accept drafts [B, k] while they are the target's own choice [B, k+1], at most `allowed` [B] of them.

    An accepted draft is what the target chose, so the emitted tokens are the target's, whatever was drafted.
    """
    k = drafts.shape[1]
    agree = (drafts == target[:, :k]) & (mx.arange(k) < allowed[:, None])
    accepted = mx.cumprod(agree.astype(mx.int32), axis=1).sum(axis=1)
    following = mx.take_along_axis(target, accepted[:, None], axis=1).squeeze(1)
    return Verdict(accepted, target, following)
