"""What layers remember of sequences, and which of it is whose."""

from collections.abc import Iterator, Sequence
from itertools import islice

import mlx.core as mx

from ..state import KV, BatchState, Recurrent
from .compressed import CompressedAttention
from .layers import Attention, Layer, Mixer


def memories_of(mixer: Mixer, rows: int, dtype: mx.Dtype, eight_bits: bool) -> list[KV | Recurrent]:
    """Return what a mixer holds of `rows` sequences before their first token."""
    made = mixer.state(rows, dtype, eight_bits)
    return made if isinstance(made, list) else [made]


def state_of(layers: Sequence[Layer], rows: int, dtype: mx.Dtype, eight_bit_kv: bool) -> BatchState:
    """Return what these layers hold of `rows` sequences before their first token."""
    made = [memories_of(mixer, rows, dtype, eight_bit_kv) for layer in layers for mixer in layer.writers]
    return BatchState.empty([memory for each in made for memory in each], rows)


def memories_by_layer(
    layers: Sequence[Layer], memories: Sequence[KV | Recurrent]
) -> Iterator[tuple[Layer, list[KV | Recurrent]]]:
    """Yield the layers, each with what its mixers remember or read."""
    own, shared = iter(memories), dict[str | None, KV | Recurrent]()
    for layer in layers:
        held = []
        for mixer in layer.mixers:
            name = mixer.shares if isinstance(mixer, Attention) else None
            memory = next(own) if mixer in layer.writers else shared[name]
            shared[name] = memory
            more = mixer.memories - 1 if isinstance(mixer, CompressedAttention) else 0
            held += [memory, *islice(own, more)]
        yield layer, held
