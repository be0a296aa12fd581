"""Tokens to the input of the first layer, and of the head's first product: one kernel where MLX takes five and eight
(see head.cu)."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..weights import MatrixWeights, matrix_weights
from .compiler import cuda_kernel
from .device import include
from .formats import Format
from .norm import norm_threads
from .products import MOST_ROWS, product_refusal


def embed_fits(tokens: mx.array, dtype: mx.Dtype, embedding: nn.Module, *norms: nn.Module) -> bool:
    """Return whether our kernels take this embedding in a type, and the norms of what it gives."""
    if tokens.size > MOST_ROWS or tokens.dtype != mx.int32:
        return False
    weights = matrix_weights(embedding)
    plain = type(embedding) in (nn.Embedding, nn.QuantizedEmbedding)
    sizes = weights.inputs % 8 == 0 and weights.inputs <= 8192 and all(n["weight"].dtype == mx.float32 for n in norms)
    return plain and sizes and product_refusal(dtype, weights) is None


def launch_embed(
    tokens: mx.array, embedding: nn.Module, norm: nn.Module, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Return the embedding of tokens [B, W] in a type, and its norm."""
    weights = matrix_weights(embedding)
    shape = (*tokens.shape, weights.inputs)
    x, normed = _embed_kernel(Format.of(weights), norm.eps)(
        inputs=[tokens, *weights.arrays(), norm["weight"]],
        output_shapes=[shape] * 2,
        output_dtypes=[dtype] * 2,
        **_launch(tokens, weights, dtype, 1),
    )
    return x, normed


def launch_draft_input(
    tokens: mx.array,
    hidden: mx.array,
    embedding: nn.Module,
    norm: nn.Module,
    hidden_norm: nn.Module,
    embedding_first: bool,
) -> mx.array:
    """Return [B, W, 2H]: the norms of the tokens' [B, W] embedding and of `hidden` [B, W, H], or in reverse."""
    weights = matrix_weights(embedding)
    made: list[mx.array] = _draft_kernel(Format.of(weights), norm.eps, hidden_norm.eps, embedding_first)(
        inputs=[tokens, hidden, *weights.arrays(), norm["weight"], hidden_norm["weight"]],
        output_shapes=[(*tokens.shape, 2 * weights.inputs)],
        output_dtypes=[hidden.dtype],
        **_launch(tokens, weights, hidden.dtype, 2),
    )
    return made[0]


def _launch(tokens: mx.array, weights: MatrixWeights, dtype: mx.Dtype, blocks: int) -> dict[str, Any]:
    threads = norm_threads(weights.inputs)
    return {
        "template": [("T", dtype), ("D", weights.inputs), ("THREADS", threads)],
        "grid": (tokens.size * threads, blocks, 1),
        "threadgroup": (threads, 1, 1),
    }


def _kernel(name: str, format: Format, inputs: list[str], outputs: list[str], sizes: str, arguments: str) -> Any:
    names = {"scales": format.scale is not None, "biases": format.has_biases}
    missing = [f"const F::Scale* const {each} = nullptr; " for each, there in names.items() if not there]
    at = inputs.index("weight") + 1
    return cuda_kernel(
        name=f"{name}_{format.bits}",
        input_names=[*inputs[:at], *(each for each, there in names.items() if there), *inputs[at:]],
        output_names=outputs,
        header=include("tensor_core", "team", "operand", "norm", "codes", "head"),
        source=f"using F = {format.text()}; {''.join(missing)}headstart::{name}<D, THREADS, F{sizes}>({arguments});",
    )


@cache
def _embed_kernel(format: Format, eps: float) -> Any:
    arguments = f"tokens, weight, scales, biases, norm, {eps!r}f, x, normed"
    return _kernel("embed", format, ["tokens", "weight", "norm"], ["x", "normed"], "", arguments)


@cache
def _draft_kernel(format: Format, eps: float, hidden_eps: float, embedding_first: bool) -> Any:
    arguments = f"tokens, hidden, weight, scales, biases, norm, {eps!r}f, hidden_norm, {hidden_eps!r}f, out"
    inputs = ["tokens", "hidden", "weight", "norm", "hidden_norm"]
    return _kernel("draft_input", format, inputs, ["out"], f", {str(embedding_first).lower()}", arguments)
