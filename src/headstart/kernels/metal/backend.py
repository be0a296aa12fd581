"""The backend of Apple GPUs: for every operation and shape what `choice.py` has chosen on the user's machine.

Nothing that was not checked on this machine is ever used. So HEADSTART_KERNELS=stock, which skips the checks, means
stock ops: they are right on every chip, but text may then depend on the number of drafts at near-ties.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import mlx.core as mx
import mlx.nn as nn

from ...state import KV, Recurrent
from ..backend import Backend
from ..checks import KernelCheck
from ..experts import stock_experts
from ..layers import Attention, LatentAttention, Layer, Pass, at_last
from ..setting import stock_forced
from ..types import ArrangedHeads, GatedDeltaWeights, HeadNorms, Ran, Window
from ..weights import MatrixWeights, matrix_weights
from .attention import WIDEST, heads_shape, metal_arrange, metal_attend
from .choice import MOST_ROWS, checks, choose, chosen_kernel, is_exact, kernels_in_use
from .experts import combine_shape, metal_combine, metal_experts, metal_route, route_shape
from .gated_delta import gated_delta_shape, metal_gated_delta
from .norm import metal_norm, norm_shape
from .products import SLICES, STOCK_ROWS, metal_products, product_shape, split_product
from .stock import StockMetal
from .tune import operations

LOG = logging.getLogger("headstart")


@cache
def metal_backend() -> "MetalBackend":
    return MetalBackend()


class MetalBackend(StockMetal):
    """The kernels beside this file, where they were chosen."""

    most_rows = MOST_ROWS
    windows = ((16, 1), (1, 5), (2, 8), (1, 16))  # at most MOST_ROWS rows

    def __str__(self) -> str:
        return kernels_in_use()

    def stock(self) -> Backend:
        return StockMetal()

    def prepare(self, weights: nn.Module, dtype: mx.Dtype, layers: Sequence[Layer] = ()) -> None:
        """Check and time kernels for what these weights compute, as far as that was not done before on this machine.
        It takes seconds, and says so."""
        if stock_forced():
            return
        try:
            choose(operations(weights, dtype), _show, exact=_may_be_exact(layers))
        except Exception as error:
            LOG.warning("Metal kernels could not be checked, so MLX's compute instead: %r", error)

    def is_exact(self, layers: Sequence[Layer], weights: nn.Module, dtype: mx.Dtype) -> bool:
        """Return whether every kernel that was chosen computes a row the same whatever stands beside it."""
        if not _may_be_exact(layers):
            return False
        try:
            return is_exact(operations(weights, dtype))
        except Exception as error:
            LOG.warning("Metal kernels could not be checked, so exact text is not promised: %r", error)
            return False

    def checks(self) -> list[KernelCheck]:
        return checks()

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return metal_norm(x, None, weight, eps)[0] if _norms(x, weight) else super().rms_norm(x, weight, eps)

    def add_and_norm(self, x: mx.array, added: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        if not _norms(x, weight):
            return super().add_and_norm(x, added, weight, eps)
        total, normed = metal_norm(x, added, weight, eps)
        return total, normed

    def multiply(self, x: mx.array, layers: Sequence[nn.Module]) -> list[mx.array]:
        if prod(x.shape[:-1]) > MOST_ROWS:
            return super().multiply(x, layers)
        return _multiply(
            "product",
            x.dtype,
            layers,
            launch=lambda weights, slices: metal_products(x, weights, slices),
            stock=lambda layer, name: split_product(x, layer, *STOCK_ROWS.get(name, STOCK_ROWS["stock"])),
        )

    def multiply_experts(self, x: mx.array, indices: mx.array, layers: Sequence[nn.Module]) -> list[mx.array] | None:
        if prod(indices.shape[:-1]) > MOST_ROWS:
            return None
        return _multiply(
            "experts",
            x.dtype,
            layers,
            launch=lambda weights, slices: metal_experts(x, indices, weights, slices),
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
        assert layer.norms is not None
        first, second = layer.norms
        norms = HeadNorms(first.weight, second.weight, first.eps)
        start = memory.offset if memory.start is None else memory.start
        return metal_arrange(both, keys, values, norms, layer.module.rope, start)

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        narrow = both.shape[1] <= WIDEST and not memory.eight_bits
        if not narrow or not _attends("attention", layer, both.dtype):
            return super().attend_heads(layer, heads, both, memory, run)
        where = memory.offset, layer.module.scale, memory.reach
        return at_last(metal_attend(heads.queries, both, memory.keys, memory.values, *where), run.last)

    def gated_delta_rule(self, net: nn.Module, window: Window, memory: Recurrent, run: Pass) -> Ran:
        state, conv = memory.state, memory.conv
        if chosen_kernel("gated delta", gated_delta_shape(window, state, conv)) != "metal":
            return super().gated_delta_rule(net, window, memory, run)
        given = window, GatedDeltaWeights.of(net), state, conv, memory.pending, run.accepted, run.certain
        return metal_gated_delta(*given)


def _may_be_exact(layers: Sequence[Layer]) -> bool:
    """Return whether there are kernels for the attention of these layers. MLX's changes its kernel with the length of
    a text."""
    mixers = [mixer for layer in layers for mixer in layer.mixers]
    attentions = [each for each in mixers if isinstance(each, Attention | LatentAttention)]
    return all(isinstance(each, Attention) and each.gated for each in attentions)


def _norms(x: mx.array, weight: mx.array) -> bool:
    return weight.dtype == mx.float32 and chosen_kernel("norm", norm_shape(x)) == "metal"


def _attends(operation: str, layer: Attention, dtype: mx.Dtype) -> bool:
    return layer.gated and chosen_kernel(operation, heads_shape(layer.module, dtype)) == "metal"


def _multiply(
    operation: str,
    dtype: mx.Dtype,
    layers: Sequence[nn.Module],
    launch: Callable[[list[MatrixWeights], int], list[mx.array]],
    stock: Callable[[nn.Module, str], mx.array],
) -> list[mx.array]:
    """Compute each layer by the kernel that was chosen for its shape: ours by `launch` with the slices of k, several
    at once where they can be; others by `stock`, with their name."""
    found = [matrix_weights(layer) for layer in layers]
    shapes = [product_shape(dtype, *pair) for pair in zip(layers, found, strict=True)]
    names = [chosen_kernel(operation, shape) for shape in shapes]
    launches: dict[tuple[str, int, int], list[int]] = {}
    for index, (name, weights) in enumerate(zip(names, found, strict=True)):
        if name in SLICES:
            launches.setdefault((name, weights.bits, weights.group), []).append(index)
    made: dict[int, mx.array] = {}
    for (name, *_), together in launches.items():
        made |= dict(zip(together, launch([found[index] for index in together], SLICES[name]), strict=True))
    return [made[i] if i in made else stock(layer, names[i]) for i, layer in enumerate(layers)]


def _show(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        text = f"Checking Metal kernels for this model, once: {done} of {total} {what}"
        print(f"\r\x1b[K{text if what else ''}", end="", file=sys.stderr, flush=True)
    elif not done:
        LOG.warning("Checking %d Metal kernels for this model, once; this takes some seconds", total)
