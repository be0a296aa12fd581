"""Counter-based random numbers: a hash of a key, and of nothing else.

No generator state is advanced, so a number does not depend on how many were drawn before it, for which sequences,
or in what order. The coupled rule keys its noise by (seed, choice, position), so that draft and target see the same
noise at the same position. The ratio rule adds the round and the purpose to the key: a position that is drafted again
after a rejection needs fresh noise, and one number must never serve both an acceptance and the draw after it.
"""

from enum import IntEnum

import mlx.core as mx


class Purpose(IntEnum):
    CHOICE = 0  # draft or choose a token, coupled rule
    DRAFT = 1  # draft a token
    ACCEPT = 2  # accept or reject a draft
    NEXT = 3  # draw a token of the target's own
    XTC = 4  # apply XTC at this position


Keys = tuple[mx.array, mx.array]  # two independent words per sequence (and position)


def mix(x: mx.array) -> mx.array:
    """Hash 32-bit words (lowbias32): a bijection in which every input bit flips every output bit half of the time."""
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


def fold(keys: Keys, word: mx.array) -> Keys:
    """Derive keys from keys and one more word: a position, a round, a purpose."""
    word = word.astype(mx.uint32)
    first, second = keys
    return mix(first ^ (word * mx.array(0x9E3779B9, mx.uint32))), mix(second + mix(word ^ first))


def split(seed: int) -> tuple[int, int]:
    """Return the low and the high word of a 64-bit seed, signed or not."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def keys_of_step(keys: Keys, rounds: mx.array, purposes: mx.array, positions: mx.array) -> Keys:
    """Derive keys [B, P, W] from keys [B], a round [B], purposes [B, P] and positions [B, W]."""
    first, second = fold(keys, rounds)
    first, second = fold((first[:, None], second[:, None]), purposes)
    return fold((first[..., None], second[..., None]), positions[:, None])


def bits(keys: Keys, ids: mx.array) -> mx.array:
    """Return a random word [..., C] for each of the token ids [..., C] of keys [...], or [C] of all keys."""
    first, second = (each[..., None] for each in keys)
    return mix(mix(first ^ ids.astype(mx.uint32)) + second)


def uniform(keys: Keys) -> mx.array:
    """Return a float32 number in (0, 1) for each key."""
    return _unit(bits(keys, mx.zeros((1,), mx.int32))).squeeze(-1)


def gumbel(keys: Keys, ids: mx.array) -> mx.array:
    """Return standard Gumbel noise for each token id (see `bits`): argmax(log p + noise) is a draw from p."""
    return -mx.log(-mx.log1p(-_unit(bits(keys, ids))))


def _unit(words: mx.array) -> mx.array:
    # The clip keeps log(-log1p(-v)) finite: without it one word in 2^24 rounds to 1.
    return mx.minimum((words.astype(mx.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
