"""Why a head drafts badly: every suspect is mended on a copy, and what drafts clearly better then was the fault.

None of these mistakes shows in what the model says. They cost acceptance, some nearly all of it and some so little
that the head still seems to work.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..models import Head, Model
from ..models.base import Norm
from .reading import Reading, first_drafts, rewired

# Of the first drafts, on the model's own greedy text. Heads that are right were seen at 72 to 90 %, broken ones at 0
# to 35 %; and a draft that falls more often than it stands seldom pays for itself.
COLLAPSED = 0.5
UNLIKELY = 1.96  # standard errors below that: one head in 40 that is just at the line would be blamed
CLEARLY, AT_LEAST = 3.0, 0.02  # a mend counts from so many standard errors and so large a gain

M = TypeVar("M", bound=nn.Module)

WHAT = {
    "norms_shifted_twice": "the 1 of 1 + w is in them twice",
    "norms_not_shifted": "stored as w, and nothing added the 1 of 1 + w",
    "pre_norm_feed": "fed the trunk's hidden before its final norm; it wants the one after",
    "post_norm_feed": "fed the trunk's hidden after its final norm; it wants the one before",
    "concat_swapped": "embedding and hidden enter mtp.fc in the wrong order",
    "zeroed": "all zeros",
    "not_finite": "not all of it finite numbers",
    "unexplained": "drafts badly, and none of the known mistakes is the reason: perhaps another model's head",
}


@dataclass(frozen=True)
class Count:
    """Of the first drafts that were tried, those that stood."""

    stood: int
    tried: int

    @property
    def share(self) -> float:
        return self.stood / self.tried if self.tried else 0.0

    @property
    def collapsed(self) -> bool:
        """The upper end of Wilson's interval is below the line: chance does not explain it."""
        margin = UNLIKELY * math.sqrt(COLLAPSED * (1 - COLLAPSED) * self.tried)
        return self.stood + margin < COLLAPSED * self.tried


@dataclass(frozen=True)
class Fault:
    name: str  # one of WHAT
    where: str  # in the head
    acceptance: float  # of the first drafts
    mended: float | None = None  # the same with the fault undone; None where it cannot be undone here

    @property
    def what(self) -> str:
        return f"{self.where}: {WHAT[self.name]}"


@dataclass(frozen=True)
class Suspect:
    """A fault that the head may have, and how to undo it."""

    name: str
    where: str
    mend: Callable[[Model], Model]


def find_faults(model: Model, readings: Sequence[Reading]) -> tuple[Count, list[Fault]]:
    """How many first drafts stand, and what is wrong with the head. Faults may hide each other, so when the
    best mend is found, the rest is tried again on top of it."""

    def drafts(model: Model) -> list[bool]:
        return [each for reading in readings for each in first_drafts(model, reading)]

    present = drafts(model)
    found = _count(present)
    faults = [replace(fault, acceptance=found.share) for fault in _broken_weights(model)]
    while True:
        tried = [(suspect, drafts(suspect.mend(model))) for suspect in _suspects(model)]
        best, mended = max(tried, key=lambda trial: sum(trial[1]))
        if not clearly_better(mended, present):
            break
        faults.append(Fault(best.name, best.where, _count(present).share, _count(mended).share))
        model, present = best.mend(model), mended
    if _count(present).collapsed and not any(fault.mended is None for fault in faults):
        faults.append(Fault("unexplained", "the head", _count(present).share))
    return found, faults


def clearly_better(other: Sequence[bool], present: Sequence[bool]) -> bool:
    """By more than chance (McNemar's test on the positions where the two differ) and by enough to matter."""
    won = sum(b and not a for a, b in zip(present, other, strict=True))
    lost = sum(a and not b for a, b in zip(present, other, strict=True))
    return won - lost >= max(CLEARLY * math.sqrt(won + lost), AT_LEAST * len(present), 1)


def shifted(model: Model, by: float, group: str) -> Model:
    """A copy whose head has `by` added to the norms of a group; what is not changed is shared."""
    head = twin(model.weights.mtp)
    for name, module in head.named_modules():
        if isinstance(module, Norm) and NORMS[group](name):
            module.weight = module.weight + by
    return with_head(model, head)


def with_head(model: Model, head: Head) -> Model:
    weights = copy(model.weights)
    weights.mtp = head
    return replace(model, weights=weights)


# Tools that shift norms by their names miss some: mlx-lm's list has those of a layer, and not the head's own.
NORMS: dict[str, Callable[[str], bool]] = {
    "all norms": lambda name: True,
    "the norms of its layer": lambda name: name.startswith("layers."),
    "mtp.norm and mtp.pre_fc_norm_*": lambda name: not name.startswith("layers."),
}


def _suspects(model: Model) -> list[Suspect]:
    spec = model.family.head
    fed = "post_norm_feed" if spec.fed_after_norm else "pre_norm_feed"
    return [
        *[Suspect("norms_shifted_twice", group, partial(shifted, by=-1.0, group=group)) for group in NORMS],
        *[Suspect("norms_not_shifted", group, partial(shifted, by=1.0, group=group)) for group in NORMS],
        Suspect(fed, "the head", partial(rewired, fed_after_norm=not spec.fed_after_norm)),
        Suspect("concat_swapped", "mtp.fc", partial(rewired, embedding_first=not spec.embedding_first)),
    ]


def _broken_weights(model: Model) -> list[Fault]:
    """Whole tensors of zeros, as memory that ran out or a torn download leaves them, and numbers that are none."""
    named: dict[str, list[str]] = {}
    for name, module in model.weights.mtp.named_modules():
        if "weight" not in module:
            continue
        if not all(bool(mx.isfinite(a).all()) for a in (module.weight, *_scales(module)) if _floating(a)):
            named.setdefault("not_finite", []).append(f"mtp.{name}")
        elif _is_zero(module):
            named.setdefault("zeroed", []).append(f"mtp.{name}")
    return [Fault(fault, ", ".join(names), 0.0) for fault, names in named.items()]


def _is_zero(module: nn.Module) -> bool:
    if "scales" not in module:
        return not module.weight.any()
    offset = module.biases.any() if "biases" in module else False
    return not offset and (not module.weight.any() or not module.scales.any())


def _scales(module: nn.Module) -> list[mx.array]:
    return [module[name] for name in ("scales", "biases") if name in module]


def _floating(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _count(right: Sequence[bool]) -> Count:
    return Count(sum(right), len(right))


def twin(module: M) -> M:
    """The same arrays in modules of their own, so that one can be changed."""
    other = copy(module)
    for name, child in module.children().items():
        other[name] = tree_map(twin, child, is_leaf=nn.Module.is_module)
    return other
