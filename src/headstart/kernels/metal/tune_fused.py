"""Kernels that do several operations of a layer at once, and what may do the same: see `tune.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from ...state import KV
from ..experts import is_swiglu
from ..layers import Attention, FeedForward, Layer, Pass
from ..norms import stock_norm
from ..types import HeadNorms
from ..weights import MatrixWeights, matrix_weights
from .attention import (
    ORDER,
    WIDEST,
    heads_refusal,
    heads_shape,
    is_plain_rope,
    metal_arrange,
    metal_attend_into,
)
from .choice import MOST_ROWS, WIDE_ROWS, Operation, Runs, chosen_kernel, decided
from .fused import FUSED, FusedProduct, layer_products
from .norm import metal_norm
from .products import KERNELS, first_outputs, metal_products, product_shape, split_product
from .tune import LENGTHS, STOCK, STRIDE, _random, _spread, operations

IN_PLACE = "attention in place"


def model_operations(
    weights: nn.Module, layers: Sequence[Layer], dtype: mx.Dtype, *, images: bool = False
) -> list[Operation]:
    """Return every distinct operation of a model, and what a kernel of ours does for several of a layer, as far as
    it is used by what was chosen: what is used instead is returned once it was.

    Where attention is computed in place, its part after the arrangement is needed with `images` only: their tokens
    have other positions.
    """
    found: dict[tuple[str, str], Operation] = {}
    for layer in layers:
        for each in _operations(layer, dtype):
            found.setdefault((each.operation, each.shape), each)
    several = [each for each in found.values() if not decided(*each.names) or chosen_kernel(*each.names) in KERNELS]
    in_place = {each.shape for each in several if each.operation == IN_PLACE}
    separate = operations(weights, dtype, layers)
    used = [each for each in separate if images or each.operation != "attention" or each.shape not in in_place]
    return [*used, *several]


def _operations(layer: Layer, dtype: mx.Dtype) -> Iterator[Operation]:
    for mixer in layer.mixers:
        if isinstance(mixer, Attention) and mixer.gated and in_place_refusal(mixer.module) is None:
            shape = heads_shape(mixer.module, dtype)
            yield Operation(IN_PLACE, shape, _in_place(mixer.module, mixer, dtype), len(LENGTHS), WIDEST)

    for each in _products(layer, dtype):
        if each.refusal(dtype) is None:
            yield _fused(each, dtype)


def _products(layer: Layer, dtype: mx.Dtype) -> Iterator[FusedProduct]:
    if (pairs := layer_products(layer, dtype)) is not None:
        for pair in pairs:
            yield from pair
        return
    for part in layer.parts:
        if isinstance(part.does, FeedForward):
            module = part.does.module
            for mlp in (module, module.get("shared_expert", module.get("shared_experts"))):
                if mlp is not None and "switch_mlp" not in mlp and is_swiglu(mlp):
                    yield FusedProduct((mlp.gate_proj, mlp.up_proj), gated=True)


def _fused(product: FusedProduct, dtype: mx.Dtype) -> Operation:
    """Return the operation of several at once, beside separate kernels."""
    layers, norm, gated, adds = product
    rows = MOST_ROWS if product.refusal(dtype, "metal-matrix") else WIDE_ROWS

    def candidates() -> Mapping[str, Runs | str]:
        names = _kernels_alone(product, dtype)
        parts = [first_outputs(each, matrix_weights(each)) for each in layers]
        found = [matrix_weights(each) for each in parts]
        x = _spread(rows, 1, found[0].inputs, dtype=dtype)
        residual = _random(rows, 1, found[0].outputs, dtype=dtype)

        def finish(made: list[mx.array], b: slice, w: slice) -> mx.array:
            made = [swiglu(*made)] if gated else made
            return mx.concatenate([residual[b, w] + made[0]] if adds else made, axis=-1)

        def stock(b: slice, w: slice) -> mx.array:
            given = x[b, w] if norm is None else stock_norm(x[b, w], norm["weight"], norm.eps)
            return finish([split_product(given, each, 1, MOST_ROWS) for each in parts], b, w)

        joined = _joined(found)
        sizes = [each.outputs for each in found]

        def apart(b: slice, w: slice) -> mx.array:
            given = x[b, w] if norm is None else metal_norm(x[b, w], None, norm["weight"], norm.eps)[0]
            (made,) = metal_products(given, [joined], names[0])
            return finish([*mx.split(made, list(accumulate(sizes[:-1])), axis=-1)], b, w)

        def ours(kernel: str) -> Runs:
            def run(b: slice, w: slice) -> mx.array:
                by = None if norm is None else (norm["weight"], norm.eps)
                added = residual[b, w] if adds else None
                made = metal_products(x[b, w], found, kernel, gated=gated, norm=by, residual=added)
                return mx.concatenate(made, axis=-1)

            return (run,)

        kernels = {name: product.refusal(dtype, name) or ours(name) for name in names}
        return {"stock": (stock,), **kernels, "metal-apart": (apart,)}

    return Operation(FUSED, product.shape(dtype), candidates, rows)


def _kernels_alone(product: FusedProduct, dtype: mx.Dtype) -> list[str]:
    """Return the kernels of ours that were chosen for these products alone: others are not compiled for several."""
    shapes = [product_shape(dtype, each, matrix_weights(each)) for each in product.layers]
    chosen = [chosen_kernel("product", shape) for shape in shapes]
    return [name for name in KERNELS if name in chosen] or ["metal"]


def _joined(matrices: Sequence[MatrixWeights]) -> MatrixWeights:
    """Return one matrix with all outputs: by it is multiplied as by several in one launch."""

    def join(arrays: Sequence[mx.array | None]) -> mx.array:
        return mx.concatenate([array for array in arrays if array is not None])

    first, *others = matrices
    if not others:
        return first
    weight = join([each.weight for each in matrices])
    if first.scales is None:
        return MatrixWeights(weight)
    scales, biases = join([each.scales for each in matrices]), join([each.biases for each in matrices])
    return MatrixWeights(weight, scales, biases, first.bits, first.group)


def in_place_refusal(layer: nn.Module) -> str | None:
    """Return why attention that writes in place does not take a layer; None if it does."""
    return heads_refusal(layer) or (None if is_plain_rope(layer.rope) else "another rotation than RoPE")


def _in_place(layer: nn.Module, described: Attention, dtype: mx.Dtype) -> Callable[[], Mapping[str, Runs | str]]:
    """Return what makes the candidates: a window's products are arranged, written into a cache, and attend to it."""
    B, H, Hkv, D = len(LENGTHS), layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)

    def candidates() -> Mapping[str, Runs | str]:
        offset = mx.array(LENGTHS, mx.int32)
        size = _reach(slice(None), slice(0, WIDEST))
        both = _random(B, WIDEST, 2 * H * D, dtype=dtype)
        new = [_random(B, WIDEST, Hkv * D + i, dtype=dtype)[..., i:] for i in (0, 1)]
        cache = [_random(B, Hkv, size + i, D, dtype=dtype)[:, :, i:] for i in (0, 1)]
        made = metal_arrange(both, new[0], new[1], norms, layer.rope, offset)
        places = (offset[:, None] + mx.arange(WIDEST))[
            :, None, :, None
        ]  # windows begin after what is written already
        cache = [mx.put_along_axis(a, places, each, axis=2) for a, each in zip(cache, made[1:], strict=True)]
        none = mx.zeros((ORDER,))

        def stock(b: slice, w: slice) -> mx.array:
            read, positions = _reach(b, w), offset[b, None] + mx.arange(w.start, w.stop)
            seen = mx.arange(read) <= positions[:, None, :, None]
            memory = KV(cache[0][b], cache[1][b], offset[b] + w.start, read)
            run = Pass(lambda window: seen, offset)
            return STOCK.attend(described, both[b, w], new[0][b, w], new[1][b, w], memory, run)

        def attend(
            b: slice, w: slice, keys: mx.array, values: mx.array, before: mx.array
        ) -> tuple[mx.array, mx.array]:
            first = offset[b] + w.start
            products = both[b, w], new[0][b, w], new[1][b, w], norms, layer.rope
            return metal_attend_into(*products, (keys, values), first, first, layer.scale, _reach(b, w), before)

        def ours(b: slice, w: slice) -> mx.array:
            return attend(b, w, cache[0][b], cache[1][b], none)[0]

        def token_by_token(b: slice, w: slice) -> mx.array:
            """Read what was written, and nothing that was not."""
            seen = mx.arange(size)[:, None] < offset[b, None, None, None]
            keys, values = (mx.where(seen, a[b], mx.nan).astype(dtype) for a in cache)
            made, before = [], none
            for t in range(w.stop):
                out, before = attend(b, slice(t, t + 1), keys, values, before)
                made.append(out)
            return mx.concatenate(made[w.start :], axis=1)

        return {"stock": (stock,), "metal": (ours, token_by_token)}

    return candidates


def _reach(b: slice, w: slice) -> int:
    """Return how many positions are read: where a neighbour is longer, more."""
    return -(-(max(LENGTHS[b]) + w.stop) // STRIDE) * STRIDE
