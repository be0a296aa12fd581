"""RMS norms with float32 weights, and the addition before them."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map


class Norm(nn.Module):
    """RMSNorm with its weight in float32 and its output in the input's type.

    Raw checkpoints store `w` of `1 + w`; that sum rounded to bfloat16 moves logits by 0.02. mlx's RMSNorm with a
    float32 weight would turn everything after it into float32.
    """

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        return stock_norm(x, self.weight, self.eps)


class SigmoidGatedNorm(nn.Module):
    """The norm of a gated delta rule's output, whose gate is a sigmoid instead of mlx-lm's silu."""

    def __init__(self, dims: int, eps: float):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        normed = mx.fast.rms_norm(x.astype(mx.float32), self.weight, self.eps)
        return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


def is_sigmoid_gated(net: nn.Module) -> bool:
    """Return whether the output of a gated delta rule has a sigmoid for a gate."""
    return isinstance(net["norm"], SigmoidGatedNorm)


def use_float32_norms(module: nn.Module, kind: type[nn.Module] = nn.RMSNorm) -> None:
    """Swap leaves of a kind of RMSNorm for `Norm`, the way `nn.quantize` swaps linear ones."""

    def swap(leaf: nn.Module) -> nn.Module:
        return Norm(leaf.weight.shape[0], leaf.eps) if type(leaf) is kind else leaf

    module.update_modules(tree_map(swap, module.leaf_modules(), is_leaf=nn.Module.is_module))


def stock_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)


class Norms:
    """Norms of the residual stream and of heads."""

    def norm(self, x: mx.array, norm: nn.Module) -> mx.array:
        """Return the norm of x [..., D], in its type."""
        return self.rms_norm(x, norm["weight"], norm.eps) if isinstance(norm, Norm) else norm(x)

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        return stock_norm(x, weight, eps)

    def add_and_norm(self, x: mx.array, added: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        """Return x + added, and its norm."""
        total = x + added
        return total, self.rms_norm(total, weight, eps)
