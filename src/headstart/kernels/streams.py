"""Several residual streams in place of one (hyper-connections), by MLX's own operations, in float32.

The input of a layer's part is a mean of all streams, each by weights of a low rank in all of them. What the part
makes is added to every stream by one number. The streams lie side by side: x is [B, W, S·H].
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .norms import Norm
from .products import Products


class StreamNorm(Norm):
    """RMSNorm of each stream by itself, in float32; the weight is as long as all of them."""

    def __init__(self, hidden: int, streams: int, eps: float):
        super().__init__(streams * hidden, eps)
        self.streams = streams

    def __call__(self, x: mx.array) -> mx.array:
        each = mx.unflatten(x.astype(mx.float32), -1, (self.streams, -1))
        return mx.fast.rms_norm(each, None, self.eps).flatten(-2) * self.weight


class StreamMixer(nn.Module):
    """The weights of one mean, with upstream's names. Without `injects` nothing is added: the end of a stack."""

    def __init__(self, hidden: int, streams: int, rank: int, eps: float, *, injects: bool = True):
        super().__init__()
        self.hc_norm = StreamNorm(hidden, streams, eps)
        self.input_mix_weight_down = nn.Linear(streams * hidden, rank, bias=False)
        self.input_mix_weight_up = nn.Linear(rank, streams * hidden, bias=False)
        if injects:
            self.block_inject_weight = nn.Linear(streams * hidden, streams, bias=False)

    @property
    def eps(self) -> float:
        eps: float = self.hc_norm.eps
        return eps


def split_streams(x: mx.array, streams: int) -> mx.array:
    """Return x [..., S·H] as [..., S, H]."""
    return mx.unflatten(x, -1, (streams, -1))


class Streams(Products):
    """Means of residual streams."""

    def norm(self, x: mx.array, norm: nn.Module) -> mx.array:
        """Return the norm of x [..., D], in its type; of streams the mean [..., H] that takes its place."""
        return self.mix(x, norm)[0] if isinstance(norm, StreamMixer) else super().norm(x, norm)

    def mix(self, x: mx.array, mixer: StreamMixer) -> tuple[mx.array, mx.array | None]:
        """Return the mean [..., H] of streams x [..., S·H] in their type, and how much each is given of what a part
        makes of it, [..., S]."""
        normed, streams = mixer.hc_norm(x), mixer.hc_norm.streams
        layers: Any = [mixer[name] for name in ("input_mix_weight_down", "block_inject_weight") if name in mixer]
        down, *inject = self.multiply(normed, layers)
        (up,) = self.multiply(nn.silu(down / streams), [mixer.input_mix_weight_up])
        weighted = split_streams(mx.sigmoid(up) * normed, streams)
        total = weighted[..., 0, :]
        for stream in range(1, streams):
            total = total + weighted[..., stream, :]
        return (total / streams).astype(x.dtype), 2 * mx.sigmoid(inject[0] / streams) if inject else None

    def inject(self, x: mx.array, made: mx.array, shares: mx.array) -> mx.array:
        """Return the streams x [..., S·H] with their shares [..., S] of what a part made [..., H]."""
        added = shares[..., None] * made.astype(mx.float32)[..., None, :]
        return (x.astype(mx.float32) + added.flatten(-2)).astype(x.dtype)
