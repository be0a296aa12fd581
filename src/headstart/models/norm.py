"""Norms whose weights stay in float32."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..kernels.norm import rms_norm


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
        return rms_norm(x, self.weight, self.eps)


def use_float32_norms(module: nn.Module, kind: type[nn.Module] = nn.RMSNorm) -> None:
    """Swap leaves of a kind of RMSNorm for `Norm`, the way `nn.quantize` swaps linear ones."""

    def swap(leaf: nn.Module) -> nn.Module:
        return Norm(leaf.weight.shape[0], leaf.eps) if type(leaf) is kind else leaf

    module.update_modules(tree_map(swap, module.leaf_modules(), is_leaf=nn.Module.is_module))
