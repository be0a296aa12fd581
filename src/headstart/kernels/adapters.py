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
_chosen: ContextVar[mx.array | None] = ContextVar("adapters of the sequences in this pass", default=None)
_applied: ContextVar[set[int] | None] = ContextVar("ids of the LayerAdapters that were added", default=None)


@dataclass(frozen=True)
class Adapter:
    """An adapter of a loaded model."""

    index: int  # among the model's adapters
    rank: int
    scale: float
    layers: int  # linear layers that it changes
    digest: str  # of its file and scale


@dataclass(frozen=True)
class LayerAdapters:
    """What adapters add to one layer: `scale · x @ down.T @ up.T`, all in float32."""

    slots: mx.array  # [adapters], where each is in the arrays below; -1 if it does not change this layer
    down: mx.array  # [slots, R, K], or [slots · experts, R, K]
    up: mx.array  # [slots, N, R], or [slots · experts, N, R]
    scales: mx.array  # [slots]

    def __deepcopy__(self, memo: dict[int, object]) -> "LayerAdapters":
        return self

    def add(self, made: mx.array, x: mx.array, chosen: mx.array, experts: mx.array | None) -> mx.array:
        """Return `made` [B, W, N] plus what the adapters `chosen` [B] add for x [B, W, K].

        With `experts` [B, W, E] of each row `made` is [B, W, E, N], and x may be [B, W, E, K].
        """
        slots = mx.where(chosen < 0, -1, self.slots[mx.maximum(chosen, 0)]).reshape(-1, 1, 1)  # [B, 1, 1]
        used = mx.maximum(slots, 0).astype(mx.uint32)
        index = mx.broadcast_to(used, (*x.shape[:2], 1))
        if experts is not None:
            index = used * (self.down.shape[0] // self.scales.shape[0]) + experts
        added = _row_products(_row_products(x.astype(mx.float32), index, self.down), index, self.up)
        added = (self.scales[used][..., None] * added).astype(made.dtype)  # [B, W, 1 or E, N]
        if experts is None:
            return mx.where(slots < 0, made, made + added.squeeze(-2))
        return mx.where(slots[..., None] < 0, made, made + added)


@contextmanager
def choose_adapters(chosen: mx.array | None) -> Iterator[None]:
    """Add the adapters of sequences [B], -1 for none, to the products in this context. None: no sequence has any."""
    token = _chosen.set(chosen)
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
    if (chosen := _chosen.get()) is None:
        return made
    pairs = [(y, layer.get(ADAPTERS)) for y, layer in zip(made, layers, strict=True)]
    if (applied := _applied.get()) is not None:
        applied.update(id(held) for _, held in pairs)
    return [y if held is None else held.add(y, x, chosen, experts) for y, held in pairs]


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
