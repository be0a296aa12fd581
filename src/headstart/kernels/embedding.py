"""Embeddings of tokens with the norms after them: cuda or stock ops."""

import mlx.core as mx
import mlx.nn as nn

from .cuda.head import embed_fits, launch_draft_input, launch_embed


def embed_and_norm(tokens: mx.array, embedding: nn.Module, norm: nn.Module) -> tuple[mx.array, mx.array]:
    """Return the embedding of tokens [B, W], and its norm."""
    if embed_fits(tokens, embedding, norm):
        return launch_embed(tokens, embedding, norm)
    x = embedding(tokens)
    return x, norm(x)


def draft_input(
    tokens: mx.array,
    hidden: mx.array,
    embedding: nn.Module,
    norm: nn.Module,
    hidden_norm: nn.Module,
    embedding_first: bool,
) -> mx.array:
    """Return the input [B, W, 2H] of a head's first product for pairs of tokens [B, W] and hidden states [B, W, H]:
    the norm of the tokens' embedding and that of the hidden states, or in reverse."""
    if embed_fits(tokens, embedding, norm, hidden_norm):
        return launch_draft_input(tokens, hidden, embedding, norm, hidden_norm, embedding_first)
    return join_pairs(norm(embedding(tokens)), hidden_norm(hidden), embedding_first)


def join_pairs(embedding: mx.array, hidden: mx.array, embedding_first: bool) -> mx.array:
    return mx.concatenate([embedding, hidden] if embedding_first else [hidden, embedding], axis=-1)
