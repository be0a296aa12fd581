"""Find out why a head drafts badly: repair each possible fault on a copy and see whether it drafts clearly better.

None of these mistakes shows in the model's output. They cost acceptance, some nearly all of it and some so little
that the head still seems to work. Repairs are compared on texts that the model wrote: the trunk runs over a text
once, and one pass of the head then tells what it would have drafted after every token.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..models import Head, Model
from ..models.base import Norm

# Share of first drafts accepted on the model's own greedy text. Sound heads were seen at 72 to 90%, broken ones at 0
# to 35%; and a draft that is rejected more often than not seldom pays for itself.
COLLAPSED = 0.5
UNLIKELY = 1.96  # standard errors below that: one sound head in 40 that is just at the line would be blamed
CLEARLY = 3.0  # standard errors by which a repair must be better to count
AT_LEAST = 0.02  # and the gain in acceptance

M = TypeVar("M", bound=nn.Module)

WHAT = {
    "norms_shifted_twice": "the 1 of 1 + w was added twice",
    "norms_not_shifted": "the 1 of 1 + w was not added",
    "pre_norm_feed": "fed the trunk's hidden state before the final norm instead of after it",
    "post_norm_feed": "fed the trunk's hidden state after the final norm instead of before it",
    "concat_swapped": "embedding and hidden enter mtp.fc in the wrong order",
    "zeroed": "all zeros",
    "not_finite": "NaN or infinite values",
    "unexplained": "drafts badly for no known reason: perhaps it is another model's head",
}
# Tools that shift norms by name miss some: mlx-lm's list has those of a layer, but not the head's own.
NORMS: dict[str, Callable[[str], bool]] = {
    "all norms": lambda name: True,
    "the norms of its layer": lambda name: name.startswith("layers."),
    "mtp.norm and mtp.pre_fc_norm_*": lambda name: not name.startswith("layers."),
}


@dataclass(frozen=True)
class TextPass:
    """One pass of the trunk over a prompt and its answer."""

    tokens: mx.array  # [1, T]
    hidden: mx.array  # [1, T, H], before the final norm
    start: int  # of the answer


@dataclass(frozen=True)
class Fault:
    name: str  # one of WHAT
    where: str  # in the head
    acceptance_rate: float  # of the first drafts
    repaired_acceptance_rate: float | None = None  # None where the fault cannot be repaired here

    @property
    def what(self) -> str:
        return f"{self.where}: {WHAT[self.name]}"


def run_trunk(model: Model, prompt: Sequence[int], answer: Sequence[int]) -> TextPass:
    tokens = mx.array([[*prompt, *answer]], mx.int32)
    hidden = rewire(model, fed_after_norm=False).trunk(tokens, model.make_state(1), certain=tokens.shape[1])
    mx.eval(hidden)
    return TextPass(tokens, hidden, len(prompt))


def first_drafts(model: Model, text: TextPass) -> list[bool]:
    """Return for each token of the answer whether the head would have drafted it right after the one before."""
    start = max(text.start, 2)  # the first pair of hidden and token drafts the third token
    hidden = model.weights.norm(text.hidden) if model.family.head.fed_after_norm else text.hidden
    outputs = model.head(hidden[:, :-2], text.tokens[:, 1:-1], model.make_head_state(1))  # [1, T-2, H]
    drafts = mx.argmax(model.draft_logits(outputs[:, start - 2 :]), axis=-1)
    right: Any = (drafts == text.tokens[:, start:])[0].tolist()
    return right


def find_faults(model: Model, texts: Sequence[TextPass]) -> tuple[list[bool], list[Fault]]:
    """Return which first drafts are accepted, and what is wrong with the head. Faults may hide each other, so when
    the best repair is found, the rest is tried again on top of it."""

    def drafts(model: Model) -> list[bool]:
        return [each for text in texts for each in first_drafts(model, text)]

    found = present = drafts(model)
    faults = _broken_weights(model, fmean(found))
    while True:
        tried = [(name, where, repaired, drafts(repaired)) for name, where, repaired in _repairs(model)]
        name, where, repaired, better = max(tried, key=lambda repair: sum(repair[3]))
        if not clearly_better(better, present):
            break
        faults.append(Fault(name, where, fmean(present), fmean(better)))
        model, present = repaired, better
    if collapsed(present) and not any(fault.repaired_acceptance_rate is None for fault in faults):
        faults.append(Fault("unexplained", "the head", fmean(present)))
    return found, faults


def collapsed(drafts: Sequence[bool]) -> bool:
    """Return whether the upper end of Wilson's interval is below COLLAPSED, so that chance does not explain it."""
    margin = UNLIKELY * math.sqrt(COLLAPSED * (1 - COLLAPSED) * len(drafts))
    return sum(drafts) + margin < COLLAPSED * len(drafts)


def clearly_better(other: Sequence[bool], present: Sequence[bool]) -> bool:
    """Return whether `other` is right more often, by more than chance (McNemar's test) and by enough to matter."""
    won = sum(b and not a for a, b in zip(present, other, strict=True))
    lost = sum(a and not b for a, b in zip(present, other, strict=True))
    return won - lost >= max(CLEARLY * math.sqrt(won + lost), AT_LEAST * len(present), 1)


def _repairs(model: Model) -> Iterator[tuple[str, str, Model]]:
    """Yield possible faults: a name, a place, and the model with it repaired."""
    for group in NORMS:
        yield "norms_shifted_twice", group, shift_norms(model, -1.0, group)
        yield "norms_not_shifted", group, shift_norms(model, 1.0, group)
    head = model.family.head
    fed = "post_norm_feed" if head.fed_after_norm else "pre_norm_feed"
    yield fed, "the head", rewire(model, fed_after_norm=not head.fed_after_norm)
    yield "concat_swapped", "mtp.fc", rewire(model, embedding_first=not head.embedding_first)


def _broken_weights(model: Model, acceptance_rate: float) -> list[Fault]:
    """Return tensors of nothing but zeros, as failed downloads leave them, and tensors with NaN or infinity."""
    broken: dict[str, list[str]] = {}
    for name, module in model.weights.mtp.named_modules():
        arrays = {part: module[part] for part in ("weight", "scales", "biases") if part in module}
        floats = [array for array in arrays.values() if mx.issubdtype(array.dtype, mx.floating)]
        if not all(bool(mx.isfinite(array).all()) for array in floats):
            broken.setdefault("not_finite", []).append(f"mtp.{name}")
        elif arrays:
            offset = arrays.pop("biases", mx.array(False)).any()  # a quantised weight is scale · weight + bias
            if not offset and not all(bool(array.any()) for array in arrays.values()):
                broken.setdefault("zeroed", []).append(f"mtp.{name}")
    return [Fault(fault, ", ".join(names), acceptance_rate) for fault, names in broken.items()]


def rewire(model: Model, **spec: bool) -> Model:
    """Return the model with the same weights and its head wired another way."""
    return replace(model, family=replace(model.family, head=replace(model.family.head, **spec)))


def shift_norms(model: Model, by: float, group: str) -> Model:
    """Return a copy whose head has `by` added to a group of norms. All other weights are shared."""
    head = copy_module(model.weights.mtp)
    for name, module in head.named_modules():
        if isinstance(module, Norm) and NORMS[group](name):
            module.weight = module.weight + by
    return with_head(model, head)


def with_head(model: Model, head: Head) -> Model:
    weights = copy(model.weights)
    weights.mtp = head
    return replace(model, weights=weights)


def copy_module(module: M) -> M:
    """Return the same arrays in new modules, so that one can be changed."""
    other = copy(module)
    for name, child in module.children().items():
        other[name] = tree_map(copy_module, child, is_leaf=nn.Module.is_module)
    return other
