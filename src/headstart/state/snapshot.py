"""The state of one sequence, cut into pieces for the prefix cache, and put together again.

A piece never shares a buffer with a larger array, which it would keep alive. It is never handed out itself: a
sequence writes into its state in place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .batch_state import BatchState
from .kv import BLOCK, GROUP
from .recurrent import Recurrent

PackedArray = tuple[mx.array, ...]  # an array as it is, or its eight-bit codes, scales and biases

# All states of one sequence, the trunk's first, each with the number of tokens that it is behind the trunk. The head
# is behind by the number of its modules: entry t of module j is made from hidden t and token t+1+j, and a prefix has
# no token after its end.
States = Sequence[tuple[BatchState, int]]


class Snapshot(NamedTuple):
    """The state after a token that cannot be cut by position."""

    hidden: mx.array  # [1, T, H], of the last tokens, whose pairs the head has still to see
    recurrent: list[tuple[mx.array, ...]]  # of each layer that cannot be cut: state and convolution inputs

    def arrays(self) -> list[mx.array]:
        return [self.hidden, *(a for layer in self.recurrent for a in layer)]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())


def take_snapshot(trunk: BatchState, hidden: mx.array, *, kept: bool = False) -> Snapshot:
    """Return the state of a sequence after its last token, or where the last pass `kept` it. `hidden` [1, T, H] are
    those of the last tokens before that."""
    layers = trunk.recurrent_layers
    states = [layer.take_kept() if kept and isinstance(layer, Recurrent) else layer.committed() for layer in layers]
    return Snapshot(mx.contiguous(hidden), [tuple(mx.contiguous(a) for a in arrays) for arrays in states])


def cut_kv(states: States, start: int, end: int, eight_bits: bool = False) -> list[PackedArray]:
    """Return keys, values and index [1, H, T, D] of the tokens from `start` to `end`, state by state."""
    for layer in (layer for state, _ in states for layer in state.kv_layers if layer.written_in_place):
        layer.launch()
    return [_pack(mx.contiguous(part), eight_bits) for part in kv_between(states, start, end)]


def kv_between(states: States, start: int, end: int) -> list[mx.array]:
    """Return views of keys, values and index [1, H, T, D] of the tokens from `start` to `end`, state by state."""
    return [
        array[:, :, max(0, start - behind) // layer.every : (end - behind) // layer.every]
        for state, behind in states
        for layer in state.kv_layers
        for array in layer.arrays()
    ]


def restore(chunks: list[list[PackedArray]], after: Snapshot, states: States, length: int) -> None:
    """Fill the states of a new sequence as if it had prefilled the `length` tokens of the chunks itself."""
    pieces = iter(zip(*chunks, strict=True))  # of every array, those of all chunks
    for state, behind in states:
        for layer in state.kv_layers:
            layer.replace([_concatenate(next(pieces), length, layer.every) for _ in layer.arrays()])
        state.lengths, state.bounds = mx.array([length - behind], mx.int32), [length]
    for layer_state, kept in zip(states[0][0].recurrent_layers, after.recurrent, strict=True):
        layer_state.restore(kept)


def _pack(piece: mx.array, eight_bits: bool) -> PackedArray:
    if not eight_bits or not piece.size or piece.shape[-1] % GROUP or not mx.issubdtype(piece.dtype, mx.floating):
        return (piece,)
    return tuple(mx.quantize(piece, group_size=GROUP, bits=8))


def _unpack(packed: PackedArray) -> mx.array:
    if len(packed) == 1:
        return packed[0]
    codes, scales, biases = packed
    return mx.dequantize(codes, scales, biases, group_size=GROUP, bits=8)


def _concatenate(packed: Sequence[PackedArray], length: int, every: int) -> mx.array:
    """Return the pieces in one array of an entry for `every` so many tokens, padded to whole blocks as those of a
    running sequence are."""
    pieces = [_unpack(each) for each in packed]
    B, H, _, D = pieces[0].shape
    padding = -(-length // BLOCK) * BLOCK // every - sum(piece.shape[2] for piece in pieces)
    return mx.concatenate([*pieces, mx.zeros((B, H, padding, D), pieces[0].dtype)], axis=2)
