"""Texts that the model wrote, read again in one pass, where nothing is decoded, drafted or rolled back.

Once the trunk has read a text, what any wiring of the head would have drafted after every one of its tokens takes one
pass of the head. So wirings are compared on the same positions of the same text, and cheaply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..models import Model
from .identity import Answer


@dataclass(frozen=True)
class Reading:
    tokens: mx.array  # [1, T], the prompt and the answer
    hidden: mx.array  # [1, T, H], the trunk's before its final norm
    start: int  # where the answer begins


def read(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> Reading:
    tokens = mx.array([[*prompt, *answer]], mx.int32)
    hidden = rewired(model, fed_after_norm=False).trunk(tokens, model.make_state(1), certain=tokens.shape[1])
    mx.eval(hidden)
    return Reading(tokens, hidden, len(prompt))


def rewired(model: Model, **spec: bool) -> Model:
    """The same weights, the head wired another way."""
    return replace(model, family=replace(model.family, head=replace(model.family.head, **spec)))


def first_drafts(model: Model, reading: Reading) -> list[bool]:
    """Of each token of the answer: is it what the head would have drafted for it, right after the one before?"""
    start = max(reading.start, 2)  # the first pair there is drafts the third token
    hidden = reading.hidden
    if model.family.head.fed_after_norm:
        hidden = model.weights.norm(hidden)
    outputs = model.head(hidden[:, :-2], reading.tokens[:, 1:-1], model.make_head_state(1))  # [1, T-2, H]
    drafts = mx.argmax(model.draft_logits(outputs[:, start - 2 :]), axis=-1)
    right: Any = (drafts == reading.tokens[:, start:])[0].tolist()
    return right


def largest_shift(model: Model, reading: Reading, answer: Answer) -> float:
    """How far the logits of the two likeliest tokens move against each other when the text is read in one pass and
    not decoded token by token: what this device's rounding does to a choice. Next to 0 where rows are independent."""
    best = mx.array([[token for token, _ in told.top[:2]] for told in answer.logprobs])  # [N, 2]
    told = mx.array([[logprob for _, logprob in told.top[:2]] for told in answer.logprobs])
    hidden = model.weights.norm(reading.hidden[0, reading.start - 1 : -1])  # [N, H]
    logits = rewired(model, fed_after_norm=True).logits(hidden).astype(mx.float32)
    read = mx.take_along_axis(logits, best, axis=-1)
    moved: Any = mx.abs((read[:, 0] - read[:, 1]) - (told[:, 0] - told[:, 1])).max().item()
    return float(moved)
