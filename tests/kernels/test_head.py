"""The CUDA kernels that embed tokens, run on the CPU: the bits of the operations that they replace."""

from collections.abc import Iterator

import cuda_on_cpu
import mlx.core as mx
import mlx.nn as nn
import pytest

from headstart.kernels.cuda import head
from headstart.kernels.cuda.backend import CudaBackend
from headstart.kernels.norms import Norm

SIZE = 640  # more eights than threads, and not the same number for each
TOKENS = mx.array([[3, 0], [9, 6]], mx.int32)

CUDA = CudaBackend()


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with cuda_on_cpu.emulated():
        yield


def embedding(bits: int, group: int, dtype: mx.Dtype, mode: str = "affine") -> nn.Module:
    made = nn.Embedding(10, SIZE)
    made.weight = mx.random.normal((10, SIZE), key=mx.random.key(bits)).astype(dtype)
    made = made if bits == 16 else made.to_quantized(group, bits, mode)
    made.set_dtype(dtype)
    return made


def rounded_once(embed: nn.Module) -> nn.Module:
    """The same embedding as MLX dequantises it on CUDA: on a CPU the product is rounded before the addition."""
    if "biases" not in embed:
        return embed
    scales, biases = (embed[name].astype(mx.float32) for name in ("scales", "biases"))
    made = nn.Embedding(10, SIZE)
    made.weight = mx.dequantize(embed.weight, scales, biases, embed.group_size, embed.bits).astype(embed.scales.dtype)
    return made


def norms(count: int) -> list[Norm]:
    made = [Norm(SIZE, eps) for eps in (1e-6, 1e-5)]
    for number, norm in enumerate(made):
        norm.weight = 1 + 0.1 * mx.random.normal((SIZE,), key=mx.random.key(number))
    return made[:count]


@pytest.mark.parametrize(
    ("bits", "group", "mode", "dtype", "first"),
    [
        (4, 64, "affine", mx.bfloat16, True),
        (8, 32, "affine", mx.float16, False),
        (16, 1, "affine", mx.bfloat16, True),
        (4, 16, "nvfp4", mx.bfloat16, False),
        *(
            pytest.param(*each, mx.bfloat16, True, marks=pytest.mark.slow)
            for each in [(4, 32, "mxfp4"), (8, 32, "mxfp8"), (6, 64, "affine"), (3, 32, "affine")]
        ),
    ],
)
def test_tokens_become_the_bits_of_the_operations_one_by_one(
    bits: int, group: int, mode: str, dtype: mx.Dtype, first: bool
) -> None:
    embed, (one, two) = embedding(bits, group, dtype, mode), norms(2)
    assert head.embed_fits(TOKENS, dtype, embed, one)
    hidden = mx.random.normal((2, 2, SIZE), key=mx.random.key(7)).astype(dtype)
    x, normed = CUDA.embed_and_norm(TOKENS, embed, one, dtype)
    pairs = CUDA.pair(TOKENS, hidden, embed, (one, two), first)
    expected = rounded_once(embed)(TOKENS)
    assert mx.array_equal(x, expected)
    assert mx.array_equal(normed, CUDA.norm(expected, one))
    assert mx.array_equal(pairs, CUDA.join_pair(expected, hidden, (one, two), first))
    assert x.dtype == normed.dtype == pairs.dtype == dtype
    alone = CUDA.pair(TOKENS[1:, 1:], hidden[1:, 1:], embed, (one, two), first)
    assert mx.array_equal(alone, pairs[1:, 1:])


def test_other_embeddings_are_left_to_the_operations() -> None:
    (norm,) = norms(1)
    assert head.embed_fits(TOKENS, mx.bfloat16, embedding(4, 64, mx.bfloat16), norm)
    assert not head.embed_fits(TOKENS, mx.float32, embedding(4, 64, mx.float32), norm)
    assert not head.embed_fits(mx.zeros((145, 1), mx.int32), mx.bfloat16, embedding(4, 64, mx.bfloat16), norm)
    scaled = type("Scaled", (nn.Embedding,), {})(10, SIZE)
    scaled.set_dtype(mx.bfloat16)
    assert not head.embed_fits(TOKENS, mx.bfloat16, scaled, norm)
