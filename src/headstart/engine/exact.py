"""Do this device's kernels compute a row the same whatever stands beside it? Then speculation changes no bit."""

from functools import lru_cache

import mlx.core as mx

from ..models import Model


@lru_cache(maxsize=8)
def rows_are_independent(model: Model) -> bool:
    """A short check: the logits of one token alone, at the head of windows of 2 to 4, and in a batch of three."""
    tokens = mx.array([[3, 5, 7, 11]]) % model.vocabulary

    def first(window: int, rows: int) -> mx.array:
        repeated = mx.repeat(tokens[:, :window], rows, axis=0)
        return model.logits(model.trunk(repeated, model.make_state(rows), certain=1))[0, 0]

    alone = first(1, 1)
    others = [first(2, 1), first(3, 1), first(4, 1), first(1, 3), first(4, 3)]
    return all(bool(mx.array_equal(alone, other)) for other in others)
