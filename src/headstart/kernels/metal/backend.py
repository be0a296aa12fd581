"""The backend of Apple GPUs: for every operation and shape what `choice.py` has chosen on the user's machine.

Nothing that was not checked on this machine is ever used. So HEADSTART_KERNELS=stock, which skips the checks, means
stock ops: they are right on every chip, but text may then depend on the number of drafts at near-ties.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

import mlx.core as mx
import mlx.nn as nn

from ...state import KV, Recurrent
from ..adapters import ChosenAdapters
from ..backend import Backend
from ..checks import KernelCheck
from ..experts import stock_experts
from ..layers import Attention, Cached, GatedDeltaNet, Layer, Mamba2, Pass
from ..norms import is_sigmoid_gated
from ..setting import stock_forced
from ..streams import HyperConnection, StreamWeights
from ..types import ArrangedHeads, GatedDeltaWeights, HeadNorms, Ran, Window, at_last
from ..weights import MatrixWeights, matrix_weights
from .attention import WIDEST, heads_shape, metal_arrange, metal_attend, metal_attend_into
from .choice import MOST_ROWS, WIDE_ROWS, Operation, checks, choose, chosen_kernel, is_exact, kernels_in_use
from .experts import combine_shape, metal_combine, metal_experts, metal_route, route_shape
from .fused import FusedProduct, Launch, launches_of
from .gated_delta import gated_delta_shape, metal_gated_delta
from .norm import metal_norm, norm_shape
from .order import Order, nothing
from .products import KERNELS, STOCK_ROWS, metal_products, most_rows, product_shape, split_product
from .steps import MetalSampling
from .stock import StockMetal
from .streams import metal_stream_weights, streams_shape
from .tune_fused import IN_PLACE, model_operations

LOG = logging.getLogger("headstart")
MOMENT = 1.0  # seconds
WINDOWS: tuple[tuple[int, int], ...] = ((16, 1), (1, 5), (2, 8), (1, 16))  # at most MOST_ROWS rows


@cache
def metal_backend() -> "MetalBackend":
    return MetalBackend()


class MetalBackend(MetalSampling, StockMetal):
    """The kernels beside this file, where they were chosen."""

    most_rows = MOST_ROWS
    in_place = True
    _seeing: ClassVar[WeakSet[Layer]] = WeakSet()  # layers of models that see images
    _fused: ClassVar[WeakKeyDictionary[Layer, list[tuple[Launch, Launch]] | None]] = WeakKeyDictionary()
    windows = WINDOWS

    def __init__(self) -> None:
        super().__init__()
        self._prepared, self._order = 0, Order()
        self._readers: dict[bool, Backend] = {}

    def __str__(self) -> str:
        return kernels_in_use()

    def form(self) -> int:
        return self._prepared  # another model's kernels may change the choice for this one

    def carried(self) -> list[mx.array]:
        return [self._order.last]

    def carry(self, arrays: list[mx.array]) -> None:
        (self._order.last,) = arrays

    def recover(self) -> None:
        self._order.last = nothing()

    def stock(self) -> Backend:
        return StockMetal()

    def prepare(
        self, weights: nn.Module, dtype: mx.Dtype, layers: Sequence[Layer] = (), *, images: bool = False
    ) -> None:
        """Check and time kernels for what these weights compute, as far as that was not done before on this machine.
        It takes seconds, and says so."""
        self._prepared += 1
        self._fused.clear()
        if images:
            self._seeing.update(layers)
        if stock_forced():
            return
        try:
            for _ in range(2):  # what is used instead of kernels that were not chosen is checked then
                choose(self._operations(layers, weights, dtype), CheckProgress(), exact=_may_be_exact(layers))
        except Exception as error:
            LOG.warning("Metal kernels could not be checked, so MLX's compute instead: %r", error)
        products = [each.chosen for each in checks() if each.operation in ("product", "experts")]
        if products and all(most_rows(chosen) == WIDE_ROWS for chosen in products):
            self.most_rows, self.windows = WIDE_ROWS, (*WINDOWS, (16, 4), (1, 64))
        else:
            self.most_rows, self.windows = MOST_ROWS, WINDOWS

    def is_exact(self, layers: Sequence[Layer], weights: nn.Module, dtype: mx.Dtype) -> bool:
        """Return whether every kernel that was chosen computes a row the same whatever stands beside it."""
        if not _may_be_exact(layers):
            return False
        try:
            return is_exact(self._operations(layers, weights, dtype))
        except Exception as error:
            LOG.warning("Metal kernels could not be checked, so exact text is not promised: %r", error)
            return False

    def _operations(self, layers: Sequence[Layer], weights: nn.Module, dtype: mx.Dtype) -> list[Operation]:
        return model_operations(weights, layers, dtype, images=any(layer in self._seeing for layer in layers))

    def reader(self, layers: Sequence[Layer], dtype: mx.Dtype) -> Backend:
        from .prompts import MetalPrompts, reads_wide  # a backend like this one

        wide = reads_wide(layers)
        if wide not in self._readers:
            self._readers[wide] = MetalPrompts(wide, self._order)
        return self._readers[wide]

    def copies_held(self, layers: Sequence[Layer], dtype: mx.Dtype, *, eight_bits: bool) -> tuple[int, int]:
        """A command buffer holds its inputs until it is done: states that a step replaces, and caches that are not
        written in place."""
        mixers = [mixer for layer in layers for mixer in layer.mixers]
        cached = [each for each in mixers if isinstance(each, Cached)]
        in_place = all(isinstance(each, Attention) and _attends(IN_PLACE, each, dtype) for each in cached)
        return 2, 1 if in_place and not eight_bits else 2

    def checks(self) -> list[KernelCheck]:
        return checks()

    def decoder_layer(
        self, layer: Layer, x: mx.array, normed: mx.array | None, memories: Sequence[KV | Recurrent], run: Pass
    ) -> tuple[mx.array, mx.array | None]:
        rows = prod(x.shape[:-1])
        launches = self._launches(layer, x.dtype) if rows <= WIDE_ROWS else None
        fit = launches is not None and all(each.takes(rows) for pair in launches for each in pair)
        if launches is None or not fit or run.share.ranks > 1:
            return super().decoder_layer(layer, x, normed, memories, run)
        held = iter(memories)
        for part, (first, last) in zip(layer.parts, launches, strict=True):
            made, does = first(x), part.does
            if isinstance(does, GatedDeltaNet):
                memory = next(held)
                assert isinstance(memory, Recurrent)
                y = self.remember_window(does.module, does.window(does.module, made), memory, run)
                made = [y.reshape(*y.shape[:2], -1)]
            elif isinstance(does, Attention):
                memory = next(held)
                assert isinstance(memory, KV)
                both, keys, values = made
                made = [self.attend(does, both, keys, values, memory, run)]
                x = at_last(x, run.last)
            (x,) = last(made[0], x)
        return x, None

    def _launches(self, layer: Layer, dtype: mx.Dtype) -> list[tuple[Launch, Launch]] | None:
        """Return how a layer is launched, found out once for what was chosen."""
        if layer not in self._fused:
            self._fused[layer] = launches_of(layer, dtype)
        return self._fused[layer]

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return metal_norm(x, None, weight, eps)[0] if _norms(x, weight) else super().rms_norm(x, weight, eps)

    def add_and_norm(self, x: mx.array, added: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        if not _norms(x, weight):
            return super().add_and_norm(x, added, weight, eps)
        total, normed = metal_norm(x, added, weight, eps)
        return total, normed

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        made = _multiply(
            "product",
            x.dtype,
            layers,
            prod(x.shape[:-1]),
            launch=lambda weights, kernel: metal_products(x, weights, kernel),
            stock=lambda layer, name: split_product(x, layer, *STOCK_ROWS.get(name, STOCK_ROWS["stock"])),
        )
        return super().multiply(x, layers) if made is None else made

    def gated_product(
        self, x: mx.array, gate: nn.Module, up: nn.Module, adapters: ChosenAdapters | None = None
    ) -> mx.array:
        product = FusedProduct((gate, up), gated=True)
        rows = prod(x.shape[:-1])
        kernel = product.kernel(x.dtype) if rows <= WIDE_ROWS else None
        if kernel is None or rows > most_rows(kernel):
            return super().gated_product(x, gate, up, adapters)
        return Launch(product, kernel)(x)[0]

    def hyper_weights(self, products: mx.array, hc: HyperConnection) -> StreamWeights:
        ours = chosen_kernel("streams", streams_shape(hc)) == "metal"
        return metal_stream_weights(products, hc) if ours else super().hyper_weights(products, hc)

    def multiply_experts(self, x: mx.array, indices: mx.array, layers: Sequence[nn.Module]) -> list[mx.array] | None:
        return _multiply(
            "experts",
            x.dtype,
            layers,
            prod(indices.shape[:-1]),
            launch=lambda weights, _: metal_experts(x, indices, weights),
            stock=lambda layer, _: stock_experts(x, indices, layer),
        )

    def route(self, logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
        ours = chosen_kernel("route", route_shape(logits, top)) == "metal"
        return metal_route(logits, top, normed) if ours else super().route(logits, top, normed)

    def combine(self, parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
        ours = chosen_kernel("combine", combine_shape(parts)) == "metal"
        return metal_combine(parts, scores, shared, gate) if ours else super().combine(parts, scores, shared, gate)

    def arrange(
        self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV
    ) -> ArrangedHeads:
        if memory.positions is not None or not _attends("heads", layer, both.dtype):
            return super().arrange(layer, both, keys, values, memory)
        start = memory.offset if memory.start is None else memory.start
        return metal_arrange(both, keys, values, _norms_of(layer), layer.module.rope, start)

    def attend(
        self, layer: Attention, both: mx.array, keys: mx.array, values: mx.array, memory: KV, run: Pass
    ) -> mx.array:
        narrow = both.shape[1] <= WIDEST and not memory.eight_bits and memory.positions is None
        if not narrow or not _attends(IN_PLACE, layer, both.dtype):
            return super().attend(layer, both, keys, values, memory, run)
        module, norms = layer.module, _norms_of(layer)
        start = memory.offset if memory.start is None else memory.start
        cache, where = (memory.keys, memory.values), (memory.offset, start, module.scale, memory.reach)
        given = both, keys, values, norms, module.rope, cache, *where, self._order.last
        out, self._order.last = metal_attend_into(*given)
        memory.keys, memory.values = mx.depends([memory.keys, memory.values], [out])
        memory.written_in_place = True
        return at_last(out, run.last)

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        narrow = both.shape[1] <= WIDEST and not memory.eight_bits
        if not narrow or not _attends("attention", layer, both.dtype):
            return super().attend_heads(layer, heads, both, memory, run)
        where = memory.offset, layer.module.scale, memory.reach
        return at_last(metal_attend(heads.queries, both, memory.keys, memory.values, *where), run.last)

    def gated_delta_rule(self, net: nn.Module, window: Window, memory: Recurrent, run: Pass) -> Ran:
        state, conv = memory.state, memory.conv
        if is_sigmoid_gated(net) or chosen_kernel("gated delta", gated_delta_shape(window, state, conv)) != "metal":
            return super().gated_delta_rule(net, window, memory, run)
        given = window, GatedDeltaWeights.of(net), state, conv, memory.pending, run.accepted, run.certain
        return metal_gated_delta(*given)


def _may_be_exact(layers: Sequence[Layer]) -> bool:
    """Return whether there are kernels for the attention of these layers. MLX's changes its kernel with the length of
    a text."""
    mixers = [mixer for layer in layers for mixer in layer.mixers]
    attentions = [each for each in mixers if not isinstance(each, GatedDeltaNet | Mamba2)]
    return all(isinstance(each, Attention) and each.gated for each in attentions)


def _norms_of(layer: Attention) -> HeadNorms:
    assert layer.norms is not None
    queries, keys = layer.norms
    return HeadNorms(queries.weight, keys.weight, queries.eps)


def _norms(x: mx.array, weight: mx.array) -> bool:
    return weight.dtype == mx.float32 and chosen_kernel("norm", norm_shape(x)) == "metal"


def _attends(operation: str, layer: Attention, dtype: mx.Dtype) -> bool:
    return layer.gated and chosen_kernel(operation, heads_shape(layer.module, dtype)) == "metal"


def _multiply(
    operation: str,
    dtype: mx.Dtype,
    layers: Sequence[nn.Module],
    rows: int,
    launch: Callable[[list[MatrixWeights], str], list[mx.array]],
    stock: Callable[[nn.Module, str], mx.array],
) -> list[mx.array] | None:
    """Compute each layer by the kernel that was chosen for its shape: ours by `launch` with its name, several at once
    where they can be; others by `stock`, with theirs. None where there are too many
    rows for one of them."""
    if rows > WIDE_ROWS:
        return None
    found = [matrix_weights(layer) for layer in layers]
    shapes = [product_shape(dtype, *pair) for pair in zip(layers, found, strict=True)]
    names = [chosen_kernel(operation, shape) for shape in shapes]
    if any(rows > most_rows(name) for name in names):
        return None
    launches: dict[tuple[str, int, int], list[int]] = {}
    for index, (name, weights) in enumerate(zip(names, found, strict=True)):
        if name in KERNELS:
            launches.setdefault((name, weights.bits, weights.group), []).append(index)
    made: dict[int, mx.array] = {}
    for (name, *_), together in launches.items():
        made |= dict(zip(together, launch([found[index] for index in together], name), strict=True))
    return [made[i] if i in made else stock(layer, names[i]) for i, layer in enumerate(layers)]


class CheckProgress:
    """Shows what is checked, once that takes more than a moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun, self._said = clock, clock(), False

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._clock() - self._begun < MOMENT:
            return
        if sys.stderr.isatty():
            text = f"Checking Metal kernels for this model, once: {done} of {total} {what}"
            print(f"\r\x1b[K{text if what else ''}", end="", file=sys.stderr, flush=True)
        elif not self._said and what:
            LOG.warning("Checking %d Metal kernels for this model, once; this takes some seconds", total)
        self._said = True
