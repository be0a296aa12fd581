"""Log-probabilities of the target, before temperature and truncation, in float32: what the model thought, whoever
drafted the token and whatever the request then made of it."""

from typing import NamedTuple

import mlx.core as mx

from .distribution import best_ids


class Logprobs(NamedTuple):
    chosen: mx.array  # [B, W], of the tokens that were said
    top_ids: mx.array  # [B, W, N], the most probable ones, best first
    top: mx.array  # [B, W, N]


def logprobs(logits: mx.array, tokens: mx.array, top: int) -> Logprobs:
    """Of `tokens` [B, W] and of the `top` best, under the model's own logits [B, W, V]."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = (mx.take_along_axis(logits, tokens[..., None], axis=-1) - total).squeeze(-1)
    top = min(top, logits.shape[-1])
    if top == 0:
        nothing = mx.zeros((*tokens.shape, 0))
        return Logprobs(chosen, nothing.astype(mx.int32), nothing)
    ids = best_ids(logits, top)
    return Logprobs(chosen, ids, mx.take_along_axis(logits, ids, axis=-1) - total)
