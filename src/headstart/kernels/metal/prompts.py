"""Reading prompts on Metal: by MLX's operations, in the form that its fused attention takes.

It is causal without a mask array, which needs the number of tokens before a pass: known on the host while a prompt is
read. Where MLX's attention is fused its scores are no array, so passes are wide. That is a rule of model and device:
how a prompt is cut decides its bits, and must not depend on the memory that is free.
"""

from collections.abc import Sequence

import mlx.core as mx

from ...state import KV
from ..layers import Attention, DeltaAttention, GatedDeltaNet, Layer, Mamba2, Pass
from ..types import ArrangedHeads
from .attention import WIDEST
from .backend import MetalBackend
from .device import has_matrix_units
from .order import Order

WIDE = 2048  # tokens of a pass
LEAST_FUSED = 1024  # positions of a pass from which on MLX fuses attention with heads of 256
FUSED = (64, 80, 96, 128)  # sizes of heads whose attention it always fuses


class MetalPrompts(MetalBackend):
    """Reads prompts."""

    def __init__(self, wide: bool, order: Order) -> None:
        """Take the order of those kernels of the decoding backend that write in place: some passes are narrow."""
        super().__init__()
        self._order = order
        if wide:
            self.chunk = self.widest = WIDE
            self.scored = LEAST_FUSED

    def attend_heads(self, layer: Attention, heads: ArrangedHeads, both: mx.array, memory: KV, run: Pass) -> mx.array:
        width = both.shape[1]
        plain = layer.window is None and run.last is None and run.certain == width > WIDEST
        if not plain or memory.begins is None:
            return super().attend_heads(layer, heads, both, memory, run)
        end = memory.begins + width
        seen = heads._replace(keys=heads.keys[:, :, :end], values=heads.values[:, :, :end])
        return self.attend_seen(layer, seen, both, "causal", run)


def reads_wide(layers: Sequence[Layer]) -> bool:
    """Return whether MLX fuses the attention of all of these layers on this device."""
    mixers = [mixer for layer in layers for mixer in layer.mixers]
    attentions = [each for each in mixers if isinstance(each, Attention)]
    others = [each for each in mixers if not isinstance(each, Attention | DeltaAttention | GatedDeltaNet | Mamba2)]
    return bool(attentions) and not others and all(map(_is_fused, attentions))


def _is_fused(layer: Attention) -> bool:
    key, value = layer.head_sizes
    if key != value or layer.sinks is not None:
        return False
    return key in FUSED or (key == 256 and layer.window is None and has_matrix_units())
