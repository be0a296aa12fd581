"""Run the trunk once over texts that the model wrote, without decoding or drafting anything.

After that, one pass of the head tells what any wiring of it would have drafted after every token. So wirings are
compared on the same positions of the same text, and cheaply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..models import Model
from .identity import GreedyAnswer


@dataclass(frozen=True)
class Replay:
    tokens: mx.array  # [1, T], prompt and answer
    hidden: mx.array  # [1, T, H], the trunk's before its final norm
    start: int  # where the answer begins


def replay(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> Replay:
    tokens = mx.array([[*prompt, *answer]], mx.int32)
    hidden = rewire(model, fed_after_norm=False).trunk(tokens, model.make_state(1), certain=tokens.shape[1])
    mx.eval(hidden)
    return Replay(tokens, hidden, len(prompt))


def rewire(model: Model, **spec: bool) -> Model:
    """Return the model with the same weights and its head wired another way."""
    return replace(model, family=replace(model.family, head=replace(model.family.head, **spec)))


def first_drafts(model: Model, text: Replay) -> list[bool]:
    """Return for each token of the answer whether the head would have drafted it right after the one before."""
    start = max(text.start, 2)  # the first pair of hidden and token drafts the third token
    hidden = text.hidden
    if model.family.head.fed_after_norm:
        hidden = model.weights.norm(hidden)
    outputs = model.head(hidden[:, :-2], text.tokens[:, 1:-1], model.make_head_state(1))  # [1, T-2, H]
    drafts = mx.argmax(model.draft_logits(outputs[:, start - 2 :]), axis=-1)
    right: Any = (drafts == text.tokens[:, start:])[0].tolist()
    return right


def largest_shift(model: Model, text: Replay, answer: GreedyAnswer) -> float:
    """Return how far the logits of the two likeliest tokens move against each other between this one pass and
    decoding token by token: what rounding on this device does. Next to 0 where rows are independent."""
    best = mx.array([[token for token, _ in each.top[:2]] for each in answer.logprobs])  # [N, 2]
    decoded = mx.array([[logprob for _, logprob in each.top[:2]] for each in answer.logprobs])
    hidden = model.weights.norm(text.hidden[0, text.start - 1 : -1])  # [N, H]
    logits = rewire(model, fed_after_norm=True).logits(hidden).astype(mx.float32)
    replayed = mx.take_along_axis(logits, best, axis=-1)
    moved: Any = mx.abs((replayed[:, 0] - replayed[:, 1]) - (decoded[:, 0] - decoded[:, 1])).max().item()
    return float(moved)
