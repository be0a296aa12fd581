"""The memory of one row, cut into pieces that outlive it, and put together again.

A piece never shares a buffer with a larger array, which it would keep alive, and is never handed out itself: a row
writes into its memory in place.
"""

from typing import NamedTuple

import mlx.core as mx

from .batch_state import BatchState
from .kv import BLOCK, KV
from .recurrent import Recurrent

GROUP = 32  # numbers that share a scale in eight bits

Pack = tuple[mx.array, ...]  # an array as it is, or its eight-bit codes, scales and biases


class States(NamedTuple):
    """What cannot be cut by position: how things stood after the last one."""

    hidden: mx.array  # [1, 1, H], of the last token
    recurrent: list[tuple[mx.array, mx.array]]  # state and convolution of each layer that has them

    def arrays(self) -> list[mx.array]:
        return [self.hidden, *(a for pair in self.recurrent for a in pair)]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


def states(rows: BatchState, hidden: mx.array) -> States:
    return States(mx.contiguous(hidden), [(mx.contiguous(m.state), mx.contiguous(m.conv)) for m in _recurrent(rows)])


def cut(rows: BatchState, head: BatchState | None, start: int, end: int) -> list[mx.array]:
    """Keys and values [1, H, T, D] of the tokens from `start` to `end`, of the trunk's layers and then of the head's.

    The head is one behind: its entry t is made of hidden t and token t+1, and a prefix knows no token after its last.
    """
    pieces = [a[:, :, start:end] for memory in _kv(rows) for a in memory.arrays()]
    if head is not None:
        pieces += [a[:, :, max(0, start - 1) : end - 1] for memory in _kv(head) for a in memory.arrays()]
    return [mx.contiguous(piece) for piece in pieces]


def join(chunks: list[list[Pack]], after: States, rows: BatchState, head: BatchState | None, length: int) -> None:
    """Fill the memory of a new row with `length` tokens, so that it stands as if it had taken them in itself."""
    layers = [memory for part in (rows, head) if part is not None for memory in _kv(part)]
    for n, memory in enumerate(layers):
        memory.keys = _concatenate([chunk[2 * n] for chunk in chunks], length)
        memory.values = _concatenate([chunk[2 * n + 1] for chunk in chunks], length)
    for layer, (state, conv) in zip(_recurrent(rows), after.recurrent, strict=True):
        layer.state, layer.conv = mx.contiguous(state), mx.contiguous(conv)
    rows.lengths, rows.bounds = mx.array([length], mx.int32), [length]
    if head is not None:
        head.lengths, head.bounds = mx.array([length - 1], mx.int32), [length]


def pack(piece: mx.array, eight_bits: bool) -> Pack:
    if not eight_bits or piece.shape[-1] % GROUP:
        return (piece,)
    return tuple(mx.quantize(piece, group_size=GROUP, bits=8))


def _kv(rows: BatchState) -> list[KV]:
    return [memory for memory in rows.layers if isinstance(memory, KV)]


def _recurrent(rows: BatchState) -> list[Recurrent]:
    return [memory for memory in rows.layers if isinstance(memory, Recurrent)]


def _unpack(packed: Pack) -> mx.array:
    if len(packed) == 1:
        return packed[0]
    codes, scales, biases = packed
    return mx.dequantize(codes, scales, biases, group_size=GROUP, bits=8)


def _concatenate(packs: list[Pack], length: int) -> mx.array:
    """With room up to a whole block, as a row has that grew by itself."""
    pieces = [_unpack(packed) for packed in packs]
    B, H, _, D = pieces[0].shape
    room = -(-length // BLOCK) * BLOCK - sum(piece.shape[2] for piece in pieces)
    return mx.concatenate([*pieces, mx.zeros((B, H, room, D), pieces[0].dtype)], axis=2)
