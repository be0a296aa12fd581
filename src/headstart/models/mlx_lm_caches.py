"""mlx-lm's caches: what a model has of them, and objects with their interface that hold our state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from ..errors import CheckpointError
from ..kernels.layers import Mask
from ..state import KV, Arrays


class RowCache:
    """What mlx-lm's attention takes for its cache: our KV, at the lengths of its sequences. Without one it is the
    cache of a layer that keeps nothing."""

    def __init__(self, kv: KV | None, lengths: mx.array, mask: Mask, window: int | None):
        self.kv, self.mask, self.window = kv, mask, window
        self.offset = lengths  # [B]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.kv is None:
            raise CheckpointError("a layer keeps keys that it did not keep in its first pass")
        self.offset = self.offset + keys.shape[2]
        return self.kv.update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what another layer has written, for one that shares it."""
        assert self.kv is not None
        return self.kv.fetch()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return self.mask(window_size or self.window)


@dataclass(frozen=True)
class Leaf:
    """One of mlx-lm's caches: of keys and values, or of arrays that a pass replaces."""

    arrays: tuple[tuple[tuple[int, ...], mx.Dtype], ...]  # shapes and types of one sequence's; of keys [1, H, T, D]
    keeps_keys: bool
    window: int | None = None
    unused: tuple[bool, ...] = ()  # of a replaced state's places, those that stay empty

    def state(self, rows: int, eight_bits: bool) -> KV | Arrays | None:
        """Return the state of so many sequences without tokens; None if the layer keeps nothing."""
        if not self.keeps_keys:
            return Arrays([mx.zeros((rows, *shape[1:]), dtype) for shape, dtype in self.arrays])
        if not self.arrays:
            return None
        (keys, dtype), (values, _) = self.arrays
        return KV.empty(rows, keys[1], keys[3], dtype, values[3], eight_bits=eight_bits)

    def cache(self, state: KV | Arrays | None, lengths: mx.array, mask: Mask) -> Any:
        """Return what mlx-lm's layer is given for its cache."""
        if not isinstance(state, Arrays):
            return RowCache(state, lengths, mask, self.window)
        given: Any = ArraysCache(len(self.unused))
        values = iter(state.values)
        given.cache = [None if empty else next(values) for empty in self.unused]
        return given


@dataclass(frozen=True)
class CachePlan:
    """How a model can be run."""

    leaves: tuple[Leaf, ...] = ()  # in the order of mlx-lm's caches; none: with those, one sequence at a time
    shape: tuple[int | None, ...] = ()  # of each of these, the number of caches in it, or None for a single one
    copies: bool = False  # windows of several tokens are right, and rejected ones can be taken back
    reason: str = ""

    @property
    def batches(self) -> bool:
        return bool(self.leaves)

    def __str__(self) -> str:
        if self.batches:
            return "in batches, " + ("with copied drafts" if self.copies else "without drafts")
        return "one sequence at a time, " + ("with copied drafts" if self.copies else "without drafts")


def first_pass(lm: nn.Module) -> tuple[mx.array, list[Any]]:
    """Describe a pass over one token without computing it: shapes are all that is asked for."""
    caches = make_prompt_cache(lm)
    return lm(mx.array([[0]]), cache=caches), caches


def flat(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from flat(cache.caches)
        else:
            yield cache


def tree_of(leaves: Sequence[Any], shape: Sequence[int | None]) -> list[Any]:
    each = iter(leaves)
    return [next(each) if size is None else CacheList(*(next(each) for _ in range(size))) for size in shape]


def describe_caches(caches: list[Any]) -> CachePlan:
    """Return how a model may run, by its caches after a pass over one token."""
    leaves = []
    for cache in flat(caches):
        if (leaf := _leaf(cache)) is None:
            return CachePlan(reason=f"it has caches of its own kind ({type(cache).__name__})")
        leaves.append(leaf)
    shape = tuple(len(cache.caches) if isinstance(cache, CacheList) else None for cache in caches)
    if any(isinstance(each, CacheList) for cache in caches if isinstance(cache, CacheList) for each in cache.caches):
        return CachePlan(reason="its caches hold caches of caches")
    return CachePlan(tuple(leaves), shape, copies=all(leaf.keeps_keys for leaf in leaves))


def _leaf(cache: Any) -> Leaf | None:
    if type(cache) is ArraysCache:
        held = [a for a in cache.cache if a is not None]
        return Leaf(_shapes(held), keeps_keys=False, unused=tuple(a is None for a in cache.cache))
    if type(cache) is KVCache or (type(cache) is RotatingKVCache and not cache.keep):
        held = [] if cache.keys is None else [cache.keys, cache.values]
        return Leaf(_shapes(held), keeps_keys=True, window=getattr(cache, "max_size", None))
    return None


def _shapes(arrays: Sequence[Any]) -> tuple[tuple[tuple[int, ...], mx.Dtype], ...]:
    return tuple((tuple(a.shape), a.dtype) for a in arrays)


def trims(lm: nn.Module) -> bool:
    """Return whether mlx-lm's caches can take tokens back at any length."""
    return all(type(cache) is KVCache for cache in flat(make_prompt_cache(lm)))


def own_bytes(lm: nn.Module) -> tuple[int, int]:
    """Return what mlx-lm's caches take, and what they take per token, as far as a pass over one token shows."""
    fixed = position = 0
    for cache in flat(first_pass(lm)[1]):
        for array in (getattr(cache, "keys", None), getattr(cache, "values", None)):
            if isinstance(array, mx.array) and array.ndim == 4:
                position += array.shape[1] * array.shape[3] * array.itemsize
        if isinstance(cache, ArraysCache):
            held: list[Any] = [a for a in cache.cache if a is not None]
            fixed += sum(a.nbytes for a in held)
    return fixed, position
