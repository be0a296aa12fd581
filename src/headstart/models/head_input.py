"""What a module of a head is given of pairs: a hidden state of the trunk, or of the draft before, and a token."""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Backend
from ..kernels.streams import split_streams
from .head import HeadSpec


class PairParts(NamedTuple):
    """How the pairs of one module are made into its layer's input."""

    spec: HeadSpec
    part: Callable[[str], Any]  # of the module, by name; None where it has none
    embedding: nn.Module  # the trunk's


def pair_input(
    backend: Backend,
    parts: PairParts,
    hidden: mx.array,
    tokens: mx.array,
    embeddings: mx.array | None,
    lengths: mx.array,
    dtype: mx.Dtype,
) -> mx.array:
    """Return the input [B, W, H] of a module's layer, of several streams [B, W, S·H], for hidden states and tokens
    [B, W] after `lengths` [B] others. `embeddings` [B, W, H] take the place of the tokens' own."""
    spec, part, embedding = parts
    matrix = part(spec.names.embedding) or embedding
    norms = part(spec.names.embedding_norm), part(spec.names.hidden_norm)
    fc = part(spec.names.fc)
    if embeddings is None and not spec.first_embedding_is_zero and spec.names.added is None:
        return backend.product(backend.pair(tokens, hidden, matrix, norms, spec.embedding_first), fc)
    given = backend.embed(tokens, matrix, dtype) if embeddings is None else embeddings
    if spec.first_embedding_is_zero:
        positions = lengths[:, None] + mx.arange(tokens.shape[1])  # [B, W]
        given = given * (positions > 0)[..., None].astype(given.dtype)
    if spec.names.added is None:
        return backend.product(backend.join_pair(given, hidden, norms, spec.embedding_first), fc)
    given = backend.product(backend.norm(given, norms[0]), part(spec.names.added))
    each, size = split_streams(hidden, hidden.shape[-1] // given.shape[-1]), norms[1]["weight"].size
    normed = backend.norm(each if size == given.shape[-1] else hidden, norms[1])  # of each stream, or of all
    each = backend.product(normed.reshape(each.shape), fc)  # [B, W, S, H]
    return (each + given[..., None, :]).flatten(-2)
