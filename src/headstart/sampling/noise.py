"""Randomness as a function of what it is for: a hash of its key, and of nothing else.

No generator is advanced, so a number does not depend on how many were drawn before it, for which rows, or in what
order. `coupled` rows key it by (seed, choice) and use it again wherever the same token of the same position comes
up: that is the coupling. `ratio` rows key it by (request, round, purpose): a position that is drafted again after
a rejection needs fresh noise, and one number must never serve both an acceptance and the draw after it.
"""

from enum import IntEnum

import mlx.core as mx


class Purpose(IntEnum):
    CHOICE = 0  # which token, coupled rows
    DRAFT = 1  # which token to draft
    ACCEPT = 2  # whether a draft stands
    RESIDUAL = 3  # which token follows
    XTC = 4  # whether the top choices are excluded at this position


Keys = tuple[mx.array, mx.array]  # two independent words a row (and position)


def mix(x: mx.array) -> mx.array:
    """A bijection of 32-bit words in which every input bit moves every output bit half of the time (lowbias32)."""
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


def fold(keys: Keys, word: mx.array | int) -> Keys:
    """Keys for one of many things: a position, a round, a purpose."""
    word = mx.array(word, mx.uint32) if isinstance(word, int) else word.astype(mx.uint32)
    first, second = keys
    return mix(first ^ (word * mx.array(0x9E3779B9, mx.uint32))), mix(second + mix(word ^ first))


def split(seed: int) -> tuple[int, int]:
    """A seed of 64 bits, signed or not, as two words."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def bits(keys: Keys, ids: mx.array) -> mx.array:
    first, second = keys
    return mix(mix(first ^ ids.astype(mx.uint32)) + second)


def uniform(keys: Keys) -> mx.array:
    """In (0, 1), in float32, one for each key."""
    return _unit(bits(keys, mx.zeros_like(keys[0])))


def gumbel(keys: Keys, ids: mx.array) -> mx.array:
    """Standard Gumbel noise for each token id: argmax(log p + noise) is then a draw from p."""
    return -mx.log(-mx.log1p(-_unit(bits(keys, ids))))


def _unit(words: mx.array) -> mx.array:
    # The clip keeps log(-log1p(-v)) finite: without it one word in 2^24 rounds to 1.
    return mx.minimum((words.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
