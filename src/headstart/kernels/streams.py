"""Several residual streams in place of one (hyper-connections), by MLX's own operations, in float32.

The input of a layer's part is a mean of all streams. What the part makes is added to every stream by one number. The
streams lie side by side: x is [B, W, S·H].

A `StreamMixer` weighs every number of the mean, by weights of a low rank in all streams; the streams stay as they
are. A `HyperConnection` weighs whole streams, and mixes them with one another by a matrix whose rows and columns sum
to 1 (manifold-constrained hyper-connections).
"""

from typing import Any, NamedTuple

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


class HyperConnection(nn.Module):
    """The weights of one mean and of the streams' mixture. Without `injects` only of the mean: the end of a stack."""

    def __init__(
        self, hidden: int, streams: int, norm_eps: float, iterations: int, eps: float, *, injects: bool = True
    ):
        """`iterations` normalise the mixture's rows and columns, `eps` is added to what they divide by."""
        super().__init__()
        self.streams, self.norm_eps, self.iterations, self.eps = streams, norm_eps, iterations, eps
        weights = (2 + streams) * streams if injects else streams
        self.fn = nn.Linear(streams * hidden, weights, bias=False)
        self.base = mx.zeros((weights,))
        self.scale = mx.ones((3 if injects else 1,))  # of the mean's weights, the shares and the mixture


class StreamEnd(Norm):
    """The end of a stack: the norm of a mean of all streams, weighted by a `hc` or plain."""

    def __init__(self, hidden: int, streams: int, eps: float, hc: HyperConnection | None = None):
        super().__init__(hidden, eps)
        self.streams = streams
        if hc is not None:
            self.hc = hc


class Mixed(NamedTuple):
    """What a part of a layer is given of several streams."""

    mean: mx.array  # [..., H], in the streams' type
    streams: mx.array  # [..., S·H], to which is added what the part makes
    shares: mx.array  # [..., S], of what it makes


class StreamWeights(NamedTuple):
    """What a `HyperConnection` makes of streams, in float32."""

    mean: mx.array  # [..., S]
    shares: mx.array  # [..., S]
    mixture: mx.array  # [..., S, S], from streams (the first) to streams


def split_streams(x: mx.array, streams: int) -> mx.array:
    """Return x [..., S·H] as [..., S, H]."""
    return mx.unflatten(x, -1, (streams, -1))


def weighted_mean(x: mx.array, weights: mx.array | None, streams: int) -> mx.array:
    """Return the sum [..., H] of streams x [..., S·H] by weights [..., S], or their plain mean, in their type."""
    each = split_streams(x.astype(mx.float32), streams)
    each = each if weights is None else each * weights[..., None]
    total = sum_in_order(each, -2)
    return (total / streams if weights is None else total).astype(x.dtype)


def sum_in_order(x: mx.array, axis: int) -> mx.array:
    """Return the sum over a short axis, one after the other: MLX's own order may change with the number of rows."""
    first, *others = (each.squeeze(axis) for each in mx.split(x, x.shape[axis], axis=axis))
    for each in others:
        first = first + each
    return first


class Streams(Products):
    """Means of residual streams."""

    def norm(self, x: mx.array, norm: nn.Module) -> mx.array:
        """Return the norm of x [..., D], in its type; of streams the mean [..., H] that takes its place."""
        if isinstance(norm, StreamMixer):
            return self.mean(x, norm)[0]
        if isinstance(norm, StreamEnd):
            hc = norm.get("hc")
            weights = None if hc is None else mx.sigmoid(self.hyper_products(x, hc) * hc.scale + hc.base) + hc.eps
            return self.rms_norm(weighted_mean(x, weights, norm.streams), norm["weight"], norm.eps)
        return super().norm(x, norm)

    def mix(self, x: mx.array, mixer: StreamMixer | HyperConnection) -> Mixed:
        """Return what a part is given of streams x [..., S·H], and what is to be done with what it makes."""
        if isinstance(mixer, StreamMixer):
            mean, shares = self.mean(x, mixer)
            assert shares is not None
            return Mixed(mean, x, shares)
        weights = self.hyper_weights(self.hyper_products(x, mixer), mixer)
        each = split_streams(x.astype(mx.float32), mixer.streams)  # [..., S, H]
        mixed = sum_in_order(weights.mixture[..., None] * each[..., None, :], -3)  # of [..., S, S, H]
        return Mixed(weighted_mean(x, weights.mean, mixer.streams), mixed.flatten(-2), weights.shares)

    def mean(self, x: mx.array, mixer: StreamMixer) -> tuple[mx.array, mx.array | None]:
        """Return the mean [..., H] of streams x [..., S·H] in their type, and how much each is given of what a part
        makes of it, [..., S]."""
        normed, streams = mixer.hc_norm(x), mixer.hc_norm.streams
        layers: Any = [mixer[name] for name in ("input_mix_weight_down", "block_inject_weight") if name in mixer]
        down, *inject = self.multiply(normed, layers)
        (up,) = self.multiply(nn.silu(down / streams), [mixer.input_mix_weight_up])
        total = sum_in_order(split_streams(mx.sigmoid(up) * normed, streams), -2)
        return (total / streams).astype(x.dtype), 2 * mx.sigmoid(inject[0] / streams) if inject else None

    def hyper_products(self, x: mx.array, hc: HyperConnection) -> mx.array:
        """Return the products [..., N] in float32 that a hyper-connection's weights are made of."""
        return self.multiply(mx.fast.rms_norm(x.astype(mx.float32), None, hc.norm_eps), [hc.fn])[0]

    def hyper_weights(self, products: mx.array, hc: HyperConnection) -> StreamWeights:
        """Return what a hyper-connection makes of its products [..., (2 + S)·S]."""
        at = [hc.streams, 2 * hc.streams]
        bases, parts = mx.split(hc.base, at), mx.split(products, at, axis=-1)
        mean, shares, mixture = (
            part * scale + base for part, scale, base in zip(parts, mx.split(hc.scale, 3), bases, strict=True)
        )
        mixture = mx.softmax(split_streams(mixture, hc.streams), axis=-1) + hc.eps
        for axis in [-2, *[-1, -2] * (hc.iterations - 1)]:
            mixture = mixture / mx.expand_dims(sum_in_order(mixture, axis) + hc.eps, axis)
        return StreamWeights(mx.sigmoid(mean) + hc.eps, 2 * mx.sigmoid(shares), mixture)

    def inject(self, x: mx.array, made: mx.array, shares: mx.array) -> mx.array:
        """Return the streams x [..., S·H] with their shares [..., S] of what a part made [..., H], in its type."""
        added = shares[..., None] * made.astype(mx.float32)[..., None, :]
        return (x.astype(mx.float32) + added.flatten(-2)).astype(made.dtype)
