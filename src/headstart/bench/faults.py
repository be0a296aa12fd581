"""Find out why a head drafts badly: repair each possible fault on a copy and see whether it drafts clearly better.

None of these mistakes shows in the model's output. They cost acceptance, some nearly all of it and some so little
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
from .replay import Replay, first_drafts, rewire

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


@dataclass(frozen=True)
class DraftCount:
    """First drafts: how many were accepted."""

    accepted: int
    tried: int

    @property
    def share(self) -> float:
        return self.accepted / self.tried if self.tried else 0.0

    @property
    def collapsed(self) -> bool:
        """Whether the upper end of Wilson's interval is below COLLAPSED, so that chance does not explain it."""
        margin = UNLIKELY * math.sqrt(COLLAPSED * (1 - COLLAPSED) * self.tried)
        return self.accepted + margin < COLLAPSED * self.tried


@dataclass(frozen=True)
class Fault:
    name: str  # one of WHAT
    where: str  # in the head
    acceptance: float  # of the first drafts
    repaired: float | None = None  # the same with the fault repaired; None where that is not possible here

    @property
    def what(self) -> str:
        return f"{self.where}: {WHAT[self.name]}"


@dataclass(frozen=True)
class Suspect:
    """A fault that the head may have, and how to repair it."""

    name: str
    where: str
    repair: Callable[[Model], Model]


def find_faults(model: Model, texts: Sequence[Replay]) -> tuple[DraftCount, list[Fault]]:
    """Return how many first drafts are accepted, and what is wrong with the head. Faults may hide each other, so when
    the best repair is found, the rest is tried again on top of it."""

    def drafts(model: Model) -> list[bool]:
        return [each for text in texts for each in first_drafts(model, text)]

    present = drafts(model)
    found = _count(present)
    faults = [replace(fault, acceptance=found.share) for fault in _broken_weights(model)]
    while True:
        tried = [(suspect, drafts(suspect.repair(model))) for suspect in _suspects(model)]
        best, repaired = max(tried, key=lambda trial: sum(trial[1]))
        if not clearly_better(repaired, present):
            break
        faults.append(Fault(best.name, best.where, _count(present).share, _count(repaired).share))
        model, present = best.repair(model), repaired
    if _count(present).collapsed and not any(fault.repaired is None for fault in faults):
        faults.append(Fault("unexplained", "the head", _count(present).share))
    return found, faults


def clearly_better(other: Sequence[bool], present: Sequence[bool]) -> bool:
    """Return whether `other` is right more often, by more than chance (McNemar's test) and by enough to matter."""
    won = sum(b and not a for a, b in zip(present, other, strict=True))
    lost = sum(a and not b for a, b in zip(present, other, strict=True))
    return won - lost >= max(CLEARLY * math.sqrt(won + lost), AT_LEAST * len(present), 1)


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


# Tools that shift norms by name miss some: mlx-lm's list has those of a layer, but not the head's own.
NORMS: dict[str, Callable[[str], bool]] = {
    "all norms": lambda name: True,
    "the norms of its layer": lambda name: name.startswith("layers."),
    "mtp.norm and mtp.pre_fc_norm_*": lambda name: not name.startswith("layers."),
}


def _suspects(model: Model) -> list[Suspect]:
    spec = model.family.head
    fed = "post_norm_feed" if spec.fed_after_norm else "pre_norm_feed"
    return [
        *[Suspect("norms_shifted_twice", group, partial(shift_norms, by=-1.0, group=group)) for group in NORMS],
        *[Suspect("norms_not_shifted", group, partial(shift_norms, by=1.0, group=group)) for group in NORMS],
        Suspect(fed, "the head", partial(rewire, fed_after_norm=not spec.fed_after_norm)),
        Suspect("concat_swapped", "mtp.fc", partial(rewire, embedding_first=not spec.embedding_first)),
    ]


def _broken_weights(model: Model) -> list[Fault]:
    """Return tensors of nothing but zeros, as failed downloads leave them, and tensors with NaN or infinity."""
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


def _count(right: Sequence[bool]) -> DraftCount:
    return DraftCount(sum(right), len(right))


def copy_module(module: M) -> M:
    """Return the same arrays in new modules, so that one can be changed."""
    other = copy(module)
    for name, child in module.children().items():
        other[name] = tree_map(copy_module, child, is_leaf=nn.Module.is_module)
    return other
