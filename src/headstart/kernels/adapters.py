"""LoRA adapters of linear layers and experts, chosen for every sequence of a batch.

A layer's module holds its adapters under `ADAPTERS`, a name that is no parameter. Its product stays the base model's;
what an adapter adds is a product of its own for every row, so that neither depends on the other rows. The kernels of
CPUs add it themselves. Where kernels fuse several layers without knowing adapters, a layer that has any never uses
them, whether or not a sequence does, so that sequences without an adapter get the same bits beside others as alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

ADAPTERS = "_adapters"
LowRank = tuple[mx.array, mx.array, mx.array, tuple[int, ...]]  # of a layer, with the slots [B] of sequences
RowProducts = Callable[[mx.array, mx.array, mx.array], mx.array]  # see `Products.row_products`


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
    up: mx.array  # [slots, R, N], or [slots · experts, R, N]; times the adapter's scale
    ranks: tuple[int, ...]  # of the slots; zeros fill up the others than the largest

    def __deepcopy__(self, memo: dict[int, object]) -> "LayerAdapters":
        return self

    def add(
        self,
        made: mx.array,
        x: mx.array,
        chosen: "ChosenAdapters",
        experts: mx.array | None,
        row_products: RowProducts,
    ) -> mx.array:
        """Return `made` [B, W, N] plus what the adapters of the sequences add for x [B, W, K], given in float32.

        With `experts` [B, W, E] of each row `made` is [B, W, E, N], and x may be [B, W, E, K].
        """
        used, without = chosen.slots_and_rest(self.slots)
        index = mx.broadcast_to(used, (*x.shape[:2], 1))
        if experts is not None:
            index = used * (self.down.shape[0] // (max(self.slots) + 1)) + experts
        added = row_products(row_products(x, index, self.down), index, self.up.swapaxes(-1, -2)).astype(made.dtype)
        if experts is None:
            added = added.squeeze(-2)
        if without is None:
            return made + added
        return mx.where(without if experts is None else without[..., None], made, made + added)


class ChosenAdapters:
    """The adapters of the sequences in one pass, by their places in layers."""

    def __init__(self, indices: mx.array, mixed: bool):
        """Take the adapters of sequences [B], -1 for none; `mixed`: some sequences have none."""
        self._indices, self._mixed = indices, mixed
        self._slots: dict[tuple[int, ...], mx.array] = {}  # most layers have the same places
        self.applied: set[int] = set()  # ids of the LayerAdapters that were added

    def slots(self, places: tuple[int, ...]) -> mx.array:
        """Return each sequence's slot [B], -1 where it has none."""
        if places not in self._slots:
            self._slots[places] = mx.array([*places, -1], mx.int32)[self._indices]  # the last is that of -1
        return self._slots[places]

    def slots_and_rest(self, places: tuple[int, ...]) -> tuple[mx.array, mx.array | None]:
        """Return each sequence's slot [B, 1, 1], 0 where it has none, and which have none; None if all have one."""
        slots = self.slots(places).reshape(-1, 1, 1)
        without = slots < 0 if self._mixed or min(places) < 0 else None
        return mx.maximum(slots, 0).astype(mx.uint32), without

    def low_rank(self, layer: nn.Module) -> LowRank | None:
        """Return what a kernel adds to the products of a layer, None if no adapter changes it."""
        held: LayerAdapters | None = layer.get(ADAPTERS)
        if held is None:
            return None
        self.applied.add(id(held))
        return held.down, held.up, self.slots(held.slots), held.ranks

    def add(
        self,
        made: list[mx.array],
        x: mx.array,
        layers: Sequence[nn.Module],
        experts: mx.array | None,
        row_products: RowProducts,
    ) -> list[mx.array]:
        """Add to the products of layers with x what the sequences' adapters add."""
        if not has_adapters(*layers):
            return made
        held: list[LayerAdapters | None] = [layer.get(ADAPTERS) for layer in layers]
        self.applied.update(id(each) for each in held)
        wide = x.astype(mx.float32)
        pairs = zip(made, held, strict=True)
        return [y if each is None else each.add(y, wide, self, experts, row_products) for y, each in pairs]


def has_adapters(*layers: nn.Module) -> bool:
    return any(ADAPTERS in layer for layer in layers)
