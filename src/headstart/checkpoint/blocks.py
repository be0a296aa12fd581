"""The blocks in which GGUF stores numbers, as MLX's quantisation has them.

Most are whole numbers times a scale, and less or plus an offset, for 32 numbers each: MLX's affine mode with the same
bits. Repacked like that they are the same numbers, exactly. K-quants multiply a scale by another, and only float32
holds the product. Q6_K has a scale for 16 numbers, which no mode has: its numbers are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import NamedTuple

import mlx.core as mx

GROUP = 32  # numbers that share a scale, in every type that is repacked


class Repacked(NamedTuple):
    """A matrix in MLX's affine mode but for the packing."""

    codes: mx.array  # [..., K] uint8
    scales: mx.array  # [..., K / GROUP]
    biases: mx.array


@dataclass(frozen=True)
class Blocks:
    """A type of GGUF's. Without `bits` its numbers are of the type `dtype`, in the file or once they are computed."""

    name: str
    size: int  # numbers in a block
    nbytes: int
    dtype: mx.Dtype  # of scales and biases, or of the numbers
    bits: int | None = None
    repack: Callable[[mx.array], Repacked] | None = None  # raw blocks [..., B, nbytes]
    compute: Callable[[mx.array], mx.array] | None = None  # raw blocks → [..., B, size]

    def row_bytes(self, columns: int) -> int:
        return columns // self.size * self.nbytes

    @property
    def plain(self) -> bool:
        """Return whether the file holds the numbers themselves."""
        return self.repack is None and self.compute is None


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes [..., K] of so many bits as MLX does, from low to high: [..., K · bits / 32] uint32."""
    count = 32 // gcd(bits, 32)  # codes that fill whole words
    codes = mx.unflatten(codes.astype(mx.uint32), -1, (-1, count))
    words = []
    for word in range(count * bits // 32):
        shifts = {i: i * bits - 32 * word for i in range(count) if -bits < i * bits - 32 * word < 32}
        parts = [codes[..., i] << shift if shift >= 0 else codes[..., i] >> -shift for i, shift in shifts.items()]
        words.append(reduce(mx.bitwise_or, parts))
    return mx.stack(words, axis=-1).flatten(-2)


def unpack(words: mx.array, bits: int) -> mx.array:
    """Return the codes [..., K] uint8 that `pack` has packed."""
    count = 32 // gcd(bits, 32)
    words = mx.unflatten(words, -1, (-1, count * bits // 32))
    codes = []
    for i in range(count):
        word, shift = divmod(i * bits, 32)
        code = words[..., word] >> shift
        if shift + bits > 32:
            code = code | (words[..., word + 1] << (32 - shift))
        codes.append((code & ((1 << bits) - 1)).astype(mx.uint8))
    return mx.stack(codes, axis=-1).flatten(-2)


def _half(raw: mx.array, at: int) -> mx.array:
    """Return the float16 at a byte of every block [..., B]."""
    return mx.contiguous(raw[..., at : at + 2]).view(mx.float16)[..., 0]


def _nibbles(raw: mx.array, width: int) -> mx.array:
    """Return the low, then the high four bits of every `width` bytes [..., n] → [..., 2n]."""
    parts = raw.reshape(*raw.shape[:-1], -1, 1, width)
    return mx.concatenate([parts & 15, parts >> 4], axis=-2).flatten(-3)


def _bits(raw: mx.array, shifts: range, mask: int, width: int) -> mx.array:
    """Return fields of every `width` bytes [..., n], one shift after another."""
    parts = raw.reshape(*raw.shape[:-1], -1, 1, width)
    return ((parts >> mx.array(list(shifts), mx.uint8)[:, None]) & mask).flatten(-3)


def _fifth_bits(raw: mx.array) -> mx.array:
    """Return the bits of four bytes [..., 4] → [..., 32], where they are worth 16."""
    parts = raw[..., None] >> mx.arange(8).astype(mx.uint8)
    return ((parts & 1) << 4).flatten(-2)


def _q4_0(raw: mx.array) -> Repacked:
    scale = _half(raw, 0)
    return Repacked(_nibbles(raw[..., 2:], 16).flatten(-2), scale, scale * -8)


def _q4_1(raw: mx.array) -> Repacked:
    return Repacked(_nibbles(raw[..., 4:], 16).flatten(-2), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: mx.array) -> Repacked:
    scale, codes = _half(raw, 0), _nibbles(raw[..., 6:], 16) | _fifth_bits(raw[..., 2:6])
    return Repacked(codes.flatten(-2), scale, scale * -16)


def _q5_1(raw: mx.array) -> Repacked:
    codes = _nibbles(raw[..., 8:], 16) | _fifth_bits(raw[..., 4:8])
    return Repacked(codes.flatten(-2), _half(raw, 0), _half(raw, 2))


def _q8_0(raw: mx.array) -> Repacked:
    scale = _half(raw, 0)
    return Repacked((raw[..., 2:] ^ 128).flatten(-2), scale, scale * -128)  # signed, and 128 more than that


def _k_scales(raw: mx.array) -> tuple[mx.array, mx.array]:
    """Return the scales and biases [..., 8B] of Q4_K and Q5_K, whose factors of six bits are in bytes 4 to 16."""
    low, middle, high = (raw[..., at : at + 4] for at in (4, 8, 12))
    factors = mx.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    offsets = mx.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    scale, offset = (_half(raw, at).astype(mx.float32)[..., None] for at in (0, 2))
    return (scale * factors).flatten(-2), -(offset * offsets).flatten(-2)


def _q4_k(raw: mx.array) -> Repacked:
    return Repacked(_nibbles(raw[..., 16:], 32).flatten(-2), *_k_scales(raw))


def _q5_k(raw: mx.array) -> Repacked:
    codes = _nibbles(raw[..., 48:], 32) | (_bits(raw[..., 16:48], range(8), 1, 32) << 4)
    return Repacked(codes.flatten(-2), *_k_scales(raw))


def _q6_k(raw: mx.array) -> mx.array:
    codes = _nibbles(raw[..., :128], 64) | (_bits(raw[..., 128:192], range(0, 8, 2), 3, 32) << 4)
    factors = mx.contiguous(raw[..., 192:208]).view(mx.int8).astype(mx.float32)
    scales = _half(raw, 208).astype(mx.float32)[..., None] * factors  # [..., B, 16]
    return ((codes.astype(mx.float32) - 32).reshape(*scales.shape, 16) * scales[..., None]).flatten(-2)


TYPES = {
    0: Blocks("F32", 1, 4, mx.float32),
    1: Blocks("F16", 1, 2, mx.float16),
    30: Blocks("BF16", 1, 2, mx.bfloat16),
    2: Blocks("Q4_0", 32, 18, mx.float16, 4, _q4_0),
    3: Blocks("Q4_1", 32, 20, mx.float16, 4, _q4_1),
    6: Blocks("Q5_0", 32, 22, mx.float16, 5, _q5_0),
    7: Blocks("Q5_1", 32, 24, mx.float16, 5, _q5_1),
    8: Blocks("Q8_0", 32, 34, mx.float16, 8, _q8_0),
    12: Blocks("Q4_K", 256, 144, mx.float32, 4, _q4_k),
    13: Blocks("Q5_K", 256, 176, mx.float32, 5, _q5_k),
    14: Blocks("Q6_K", 256, 210, mx.float32, compute=_q6_k),
}
