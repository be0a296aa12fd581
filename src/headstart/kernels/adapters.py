"""LoRA adapters of linear layers and experts, chosen for every sequence of a batch.

A layer's module holds its adapters under `ADAPTERS`, a name that is no parameter. Its product stays the base model's;
what an adapter adds is a product of its own for every row, so that neither depends on the other rows. Kernels that
fuse several layers do not know adapters: a layer that has any never uses them, whether or not a sequence does, so
that sequences without an adapter get the same bits beside others as alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from . import cpu

ADAPTERS = cpu.ADAPTERS
_chosen: ContextVar["ChosenAdapters | None"] = ContextVar("adapters of the sequences in this pass", default=None)
_applied: ContextVar[set[int] | None] = ContextVar("ids of the LayerAdapters that were added", default=None)


@dataclass(frozen=True)
class Adapter:
    """An adapter of a loaded model."""

    index: int  # among the model's adapters
    digest: str  # of its file and scale


@dataclass(frozen=True)
class LayerAdapters:
    """What adapters add to one layer: `x @ down.T @ up.T`, all in float32."""

    slots: tuple[int, ...]  # of every adapter in the arrays below; -1 if it does not change this layer
    down: mx.array  # [slots, R, K], or [slots · experts, R, K]
    up: mx.array  # [slots, N, R], or [slots · experts, N, R]; times the adapter's scale

    def __deepcopy__(self, memo: dict[int, object]) -> "LayerAdapters":
        return self

    def add(self, made: mx.array, x: mx.array, chosen: "ChosenAdapters", experts: mx.array | None) -> mx.array:
        """Return `made` [B, W, N] plus what the adapters of the sequences add for x [B, W, K], given in float32.

        With `experts` [B, W, E] of each row `made` is [B, W, E, N], and x may be [B, W, E, K].
        """
        used, without = chosen.slots(self.slots)
        index = mx.broadcast_to(used, (*x.shape[:2], 1))
        if experts is not None:
            index = used * (self.down.shape[0] // (max(self.slots) + 1)) + experts
        added = _row_products(_row_products(x, index, self.down), index, self.up).astype(made.dtype)
        if experts is None:
            added = added.squeeze(-2)
        if without is None:
            return made + added
        return mx.where(without if experts is None else without[..., None], made, made + added)


class ChosenAdapters:
    """The adapters of the sequences in one pass, by their places in layers."""

    def __init__(self, indices: mx.array, mixed: bool):
        self._indices, self._mixed = indices, mixed
        self._known: dict[tuple[int, ...], tuple[mx.array, mx.array | None]] = {}  # most layers have the same places

    def slots(self, places: tuple[int, ...]) -> tuple[mx.array, mx.array | None]:
        """Return each sequence's slot [B, 1, 1], 0 where it has none, and which have none; None if all have one."""
        if places not in self._known:
            slots = mx.array([*places, -1], mx.int32)[self._indices].reshape(-1, 1, 1)  # the last is that of -1
            without = slots < 0 if self._mixed or min(places) < 0 else None
            self._known[places] = mx.maximum(slots, 0).astype(mx.uint32), without
        return self._known[places]


@contextmanager
def choose_adapters(indices: mx.array | None, *, mixed: bool = True) -> Iterator[None]:
    """Add the adapters of sequences [B], -1 for none, to the products in this context. None: no sequence has any.

    `mixed`: some sequences have none.
    """
    token = _chosen.set(None if indices is None else ChosenAdapters(indices, mixed))
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def applied_adapters() -> Iterator[set[int]]:
    """Collect the ids of the LayerAdapters that are added in this context."""
    applied: set[int] = set()
    token = _applied.set(applied)
    try:
        yield applied
    finally:
        _applied.reset(token)


def add_adapters(
    made: list[mx.array], x: mx.array, layers: tuple[nn.Module, ...], experts: mx.array | None = None
) -> list[mx.array]:
    """Add to the products of layers with x what the sequences' adapters add."""
    if (chosen := _chosen.get()) is None or not has_adapters(*layers):
        return made
    pairs = [(y, layer.get(ADAPTERS)) for y, layer in zip(made, layers, strict=True)]
    if (applied := _applied.get()) is not None:
        applied.update(id(held) for _, held in pairs)
    wide = x.astype(mx.float32)
    return [y if held is None else held.add(y, wide, chosen, experts) for y, held in pairs]


def has_adapters(*layers: nn.Module) -> bool:
    return any(ADAPTERS in layer for layer in layers)


def _row_products(x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
    """Return the product of every row with the weights [S, N, K] at its `indices` [..., E]: [..., E, N].

    `x` is [..., K], or [..., E, K]. Every row is a product of its own, whatever kernel computes it.
    """
    own = x.ndim > indices.ndim
    if (native := cpu.native()) is not None:
        made: mx.array = native.products(x, [(weights, None, None, 0, 0)], False, indices, own)[0]
        return made
    x = x[..., None, :] if own else x[..., None, None, :]
    return mx.gather_mm(x, weights.swapaxes(-1, -2), rhs_indices=indices).squeeze(-2)
