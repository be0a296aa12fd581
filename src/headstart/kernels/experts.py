"""The parts of a mixture of experts: cpu, cuda, metal or stock ops."""

from math import prod

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

from . import cpu, metal
from .adapters import add_adapters, has_adapters
from .cuda import on_cuda
from .cuda.experts import launch_combine, launch_experts, launch_route
from .cuda.products import MOST_ROWS, MatrixWeights, SumOrder, matrix_weights, product_refusal
from .metal.device import type_name
from .metal.experts import metal_combine, metal_experts, metal_route
from .products import chosen_products


def expert_products(
    x: mx.array, indices: mx.array, *layers: nn.Module, always: bool = False
) -> list[mx.array] | None:
    """Return what every expert of a row's `indices` [..., E] makes of it, for every layer: [..., E, N].

    `x` is [..., K], or [..., E, K] where each expert has an input of its own. None where a layer does not fit: call
    mlx-lm's, which for many rows sorts them first. With `always` stock ops compute those in the order of the rows.
    """
    made = _expert_products(x, indices, *layers)
    if made is None and always:
        made = [stock_experts(x, indices, layer) for layer in layers]
    return None if made is None else add_adapters(made, x, layers, indices)


def _expert_products(x: mx.array, indices: mx.array, *layers: nn.Module) -> list[mx.array] | None:
    if (native := cpu.native()) is not None:
        return cpu.native_products(native, x, layers, experts=indices, own=x.ndim > indices.ndim)
    if metal.on_metal() and prod(indices.shape[:-1]) <= metal.MOST_ROWS:
        return chosen_products(
            "experts",
            x.dtype,
            layers,
            launch=lambda weights, slices: metal_experts(x, indices, weights, slices),
            stock=lambda layer, _: stock_experts(x, indices, layer),
        )
    found = [matrix_weights(layer) for layer in layers]
    if not _fits(x, indices, found):
        return None
    if len({SumOrder.of(weights) for weights in found}) > 1:
        return [launch_experts(x, indices, [weights])[0] for weights in found]
    return launch_experts(x, indices, found)


def stock_experts(x: mx.array, indices: mx.array, layer: nn.Module) -> mx.array:
    """Return mlx-lm's product, the rows in their order. The order of sorted ones' sums changes with their number."""
    own = x.ndim > indices.ndim
    made: mx.array = layer(x[..., None, :] if own else x[..., None, None, :], indices)
    return made.squeeze(-2)


def swiglu_experts(
    x: mx.array, indices: mx.array, gate: nn.Module, up: nn.Module, *, always: bool = False
) -> mx.array | None:
    """Return `silu(gate) * up` of each expert in `indices` [..., E]: [..., K] → [..., E, N]; None as above."""
    found = [matrix_weights(gate), matrix_weights(up)]
    fused = cpu.native() is None and not has_adapters(gate, up) and _fits(x, indices, found)
    if fused and SumOrder.of(found[0]) == SumOrder.of(found[1]):
        return launch_experts(x, indices, found, gated=True)[0]
    both = expert_products(x, indices, gate, up, always=always)
    return None if both is None else swiglu(*both)


def _fits(x: mx.array, indices: mx.array, weights: list[MatrixWeights]) -> bool:
    rows = prod(indices.shape[:-1])
    return on_cuda() and rows <= MOST_ROWS and not any(product_refusal(x.dtype, each) for each in weights)


def route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    """Return the `top` experts of a row by its logits [..., E], and their scores: [..., top] each.

    The order in which stock ops name the experts, and whom they choose among equals, may change with the number of
    rows.
    """
    if on_cuda() and logits.dtype in (mx.bfloat16, mx.float16) and logits.shape[-1] <= 1024 and top <= 32:
        return launch_route(logits, top, normed)
    if metal.on_metal() and metal.chosen_kernel("route", route_shape(logits, top)) == "metal":
        return metal_route(logits, top, normed)
    return stock_route(logits, top, normed)


def route_shape(logits: mx.array, top: int) -> str:
    return f"{top} of {logits.shape[-1]}, {type_name(logits.dtype)}"


def stock_route(logits: mx.array, top: int, normed: bool) -> tuple[mx.array, mx.array]:
    gates = mx.softmax(logits, axis=-1, precise=True)
    indices = mx.argpartition(gates, kth=-top, axis=-1)[..., -top:]
    scores = mx.take_along_axis(gates, indices, axis=-1)
    return indices, scores / scores.sum(axis=-1, keepdims=True) if normed else scores


def combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    """Sum what experts made [..., E, N] by their scores [..., E], and what all rows share [..., N] by the sigmoid of
    its gate [..., 1]. The order of a stock sum may change with the number of rows."""
    if on_cuda() and parts.dtype in (mx.bfloat16, mx.float16):
        return launch_combine(parts, scores, shared, gate)
    if metal.on_metal() and metal.chosen_kernel("combine", combine_shape(parts)) == "metal":
        return metal_combine(parts, scores, shared, gate)
    return stock_combine(parts, scores, shared, gate)


def combine_shape(parts: mx.array) -> str:
    return f"{parts.shape[-2]} of {parts.shape[-1]}, {type_name(parts.dtype)}"


def stock_combine(parts: mx.array, scores: mx.array, shared: mx.array, gate: mx.array) -> mx.array:
    return (parts * scores[..., None]).sum(axis=-2) + mx.sigmoid(gate) * shared
