"""Chains of drafts from every position of a text at once, by the model's own `head`.

The engine runs the head over the committed pairs, then chains k drafts. Here every position t of a text begins such a
chain, fed with the true tokens: it sees the pairs 0 .. t and its own steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..models import Model
from ..state import KV, BatchState


@dataclass
class ChainKV(KV):
    """Keys and values of all steps so far, one step's after another's. Gradients pass through them."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.capacity:
            keys, values = mx.concatenate([self.keys, keys], 2), mx.concatenate([self.values, values], 2)
        self.keys, self.values = keys, values
        return keys, values


@dataclass
class ChainState(BatchState):
    step: int = 0

    def reserve(self, width: int) -> Callable[..., mx.array]:
        """Begin the next step. Of `width` chains the one at t is `step` positions further."""
        step, self.step = self.step, self.step + 1
        for layer in self.kv_layers:
            layer.offset = self.lengths + step

        def mask(window: int | None = None) -> mx.array:
            begin, key = mx.arange(width)[:, None], mx.arange(width)[None]
            pairs = key <= begin
            if window is not None:
                pairs = pairs & (key > begin + step - window)
            own = key == begin
            return mx.concatenate([pairs] + [own] * step, axis=1)[None, None]  # [1, 1, W, W·(step + 1)]

        return mask


def chains(model: Model, hidden: mx.array, tokens: mx.array, steps: int) -> list[mx.array]:
    """Return what each of the steps makes at every position, [B, T, H]; at t step j predicts token t + j + 1.

    Args:
        hidden: The trunk's for the first T tokens, [B, T, H].
        tokens: [B, T + steps].
    """
    length = hidden.shape[1]
    kept = model.make_head_state(hidden.shape[0])
    state = ChainState([ChainKV.of(layer.arrays()) for layer in kept.kv_layers], kept.lengths, kept.accepted)
    hidden, made = hidden.astype(model.dtype), []
    for step in range(1, steps + 1):
        hidden = model.head(hidden, tokens[:, step : step + length], state)
        made.append(hidden)
    return made
