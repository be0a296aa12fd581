"""Products that do more than multiply, and the layers that are made of them: each saves launches."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..adapters import has_adapters
from ..experts import is_swiglu
from ..layers import Attention, FeedForward, GatedDeltaNet, Layer
from ..norms import Norm
from ..weights import matrix_weights
from .choice import chosen_kernel, decided
from .products import KERNELS, MOST_FUSED, metal_products, metal_refusal, most_rows, product_shape
from .used import weights_format

FUSED = "fused product"


class FusedProduct(NamedTuple):
    """Products of one input, with what is before or after them."""

    layers: Sequence[nn.Module]
    norm: nn.Module | None = None  # of the input
    gated: bool = False  # the silu of the first times the second
    adds: bool = False  # to the residual stream

    def shape(self, dtype: mx.Dtype) -> str:
        """Return what the kernel is chosen by."""
        shapes = [product_shape(dtype, each, matrix_weights(each)) for each in self.layers]
        same = f"{len(shapes)} of {shapes[0]}" if len(set(shapes)) == 1 else " and ".join(shapes)
        return ", ".join(
            [same, *["normed"] * (self.norm is not None), *["gated"] * self.gated, *["added"] * self.adds]
        )

    def refusal(self, dtype: mx.Dtype, kernel: str = "metal") -> str | None:
        """Return why a kernel does not take the layers; None if it does."""
        found = [matrix_weights(each) for each in self.layers]
        if len({weights_format(each) for each in found}) > 1 or len(found) > MOST_FUSED:
            return "layers are quantised in different ways"
        if self.gated and found[0].weight.shape != found[1].weight.shape:
            return "gate and up are not alike"
        if has_adapters(*self.layers):
            return "layers have adapters"
        refusals = (
            metal_refusal(dtype, each, weights, kernel) for each, weights in zip(self.layers, found, strict=True)
        )
        return next((each for each in refusals if each), None)

    def kernel(self, dtype: mx.Dtype) -> str | None:
        """Return which of our kernels was chosen; None where separate ones were."""
        chosen = chosen_kernel(FUSED, self.shape(dtype))
        return chosen if chosen in KERNELS and not has_adapters(*self.layers) else None


class Launch(NamedTuple):
    """A product with the kernel that was chosen for it."""

    product: FusedProduct
    kernel: str

    def takes(self, rows: int) -> bool:
        return rows <= most_rows(self.kernel)

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> list[mx.array]:
        norm, found = self.product.norm, [matrix_weights(each) for each in self.product.layers]
        by = None if norm is None else (norm["weight"], norm.eps)
        return metal_products(x, found, self.kernel, gated=self.product.gated, norm=by, residual=residual)


def layer_products(layer: Layer, dtype: mx.Dtype) -> list[tuple[FusedProduct, FusedProduct]] | None:
    """Return the first and the last products of each part of a layer; None where they do not fit the kernel."""
    made = []
    for norm, does, *_ in layer.parts:
        ends = _ends(does)
        if ends is None or not isinstance(norm, Norm) or not layer.is_plain:
            return None
        first, last = ends
        made.append((FusedProduct(first, norm, isinstance(does, FeedForward)), FusedProduct([last], adds=True)))
    return None if any(each.refusal(dtype) for pair in made for each in pair) else made


def _ends(does: object) -> tuple[Sequence[nn.Module], nn.Module] | None:
    """Return the first products of a part, which share its input, and the last."""
    if isinstance(does, GatedDeltaNet):
        return does.projections, does.module.out_proj
    if isinstance(does, Attention):
        plain = does.gated and does.writes and not does.values_are_keys
        part = does.module
        if plain and does.value_norm is None and does.head_gates is None:
            return (part.q_proj, part.k_proj, part.v_proj), part.o_proj
    if isinstance(does, FeedForward):
        mlp = does.module
        if type(does) is FeedForward and "switch_mlp" not in mlp and is_swiglu(mlp):
            return (mlp.gate_proj, mlp.up_proj), mlp.down_proj
    return None


def may_be_launched(layer: Layer, dtype: mx.Dtype) -> bool:
    """Return whether `launches_of` a layer are known, or may be once their kernels are chosen."""
    pairs = layer_products(layer, dtype)
    each = [product for pair in pairs or [] for product in pair]
    return bool(each) and all(
        product.kernel(dtype) is not None or not decided(FUSED, product.shape(dtype)) for product in each
    )


def launches_of(layer: Layer, dtype: mx.Dtype) -> list[tuple[Launch, Launch]] | None:
    """Return how a layer is launched; None where separate kernels were chosen for one of its products."""
    made = []
    for pair in layer_products(layer, dtype) or []:
        kernels = [each.kernel(dtype) for each in pair]
        if kernels[0] is None or kernels[1] is None:
            return None
        made.append((Launch(pair[0], kernels[0]), Launch(pair[1], kernels[1])))
    return made or None
