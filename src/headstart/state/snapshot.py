"""The state of one sequence, cut into pieces for the prefix cache, and put together again.

A piece never shares a buffer with a larger array, which it would keep alive. It is never handed out itself: a
sequence writes into its state in place.
"""

from typing import NamedTuple

import mlx.core as mx

from .batch_state import BatchState
from .kv import BLOCK, KV

GROUP = 32  # numbers that share a scale in eight bits

PackedArray = tuple[mx.array, ...]  # an array as it is, or its eight-bit codes, scales and biases


class Snapshot(NamedTuple):
    """The state after a token that cannot be cut by position."""

    hidden: mx.array  # [1, T, H], of the last tokens, whose pairs the head has still to see
    recurrent: list[tuple[mx.array, mx.array]]  # state and convolution inputs of each recurrent layer

    def arrays(self) -> list[mx.array]:
        return [self.hidden, *(a for pair in self.recurrent for a in pair)]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


def take_snapshot(trunk: BatchState, hidden: mx.array) -> Snapshot:
    """Return the state of a sequence after its last token; `hidden` [1, T, H] are those of its last tokens."""
    recurrent = [(mx.contiguous(layer.state), mx.contiguous(layer.conv)) for layer in trunk.recurrent_layers]
    return Snapshot(mx.contiguous(hidden), recurrent)


def cut_kv(
    trunk: BatchState, head: BatchState | None, start: int, end: int, behind: int, eight_bits: bool = False
) -> list[PackedArray]:
    """Return keys and values [1, H, T, D] of the tokens from `start` to `end`, first the trunk's and then the head's.

    The head is `behind` by the number of its modules: entry t of module j is made from hidden t and token t+1+j, and
    a prefix has no token after its end.
    """
    pieces = [a[:, :, start:end] for layer in trunk.kv_layers for a in layer.arrays()]
    if head is not None:
        pieces += [a[:, :, max(0, start - behind) : end - behind] for layer in head.kv_layers for a in layer.arrays()]
    return [_pack(mx.contiguous(piece), eight_bits) for piece in pieces]


def restore(
    chunks: list[list[PackedArray]], after: Snapshot, trunk: BatchState, head: BatchState | None, length: int
) -> None:
    """Fill the state of a new sequence as if it had prefilled the `length` tokens of the chunks itself."""
    layers: list[KV] = trunk.kv_layers + (head.kv_layers if head is not None else [])
    for n, layer in enumerate(layers):
        layer.keys = _concatenate([chunk[2 * n] for chunk in chunks], length)
        layer.values = _concatenate([chunk[2 * n + 1] for chunk in chunks], length)
    for recurrent, (state, conv) in zip(trunk.recurrent_layers, after.recurrent, strict=True):
        recurrent.state, recurrent.conv = mx.contiguous(state), mx.contiguous(conv)
    trunk.lengths, trunk.bounds = mx.array([length], mx.int32), [length]
    if head is not None:
        head.lengths, head.bounds = mx.array([length - after.hidden.shape[1]], mx.int32), [length]


def _pack(piece: mx.array, eight_bits: bool) -> PackedArray:
    if not eight_bits or piece.shape[-1] % GROUP:
        return (piece,)
    return tuple(mx.quantize(piece, group_size=GROUP, bits=8))


def _unpack(packed: PackedArray) -> mx.array:
    if len(packed) == 1:
        return packed[0]
    codes, scales, biases = packed
    return mx.dequantize(codes, scales, biases, group_size=GROUP, bits=8)


def _concatenate(packed: list[PackedArray], length: int) -> mx.array:
    """Return the pieces in one array, padded to whole blocks as those of a running sequence are."""
    pieces = [_unpack(each) for each in packed]
    B, H, _, D = pieces[0].shape
    padding = -(-length // BLOCK) * BLOCK - sum(piece.shape[2] for piece in pieces)
    return mx.concatenate([*pieces, mx.zeros((B, H, padding, D), pieces[0].dtype)], axis=2)
