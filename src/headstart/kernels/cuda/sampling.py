"""Draw tokens from rows of logits in two launches (see sampling.cu)."""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from .compiler import cuda_kernel
from .device import include, launch_bounds, on_cuda

THREADS = 1024  # of a block
PARTS = 16  # blocks that share a row, at most
ROWS = 16  # that have so many; more rows have fewer
WORK = 2 * (4 + 16 + 2 * 1024)  # words of memory that a row's blocks share


class SequenceArrays(NamedTuple):
    """Say how every sequence samples, and what keys its noise."""

    params: mx.array  # [B, 5] float32: temperature, top_k, top_p, log(min_p), min_keep
    words: mx.array  # [B, 6] uint32: two words of its keys, 1 under the ratio rule, words of three purposes


class Draws(NamedTuple):
    tokens: mx.array  # [B, W] int32
    finite: mx.array  # [B, W] int32, 0 where a logit is NaN or the largest infinite
    cuts: mx.array  # [B, W, 4] uint32, what each was drawn from, for a kernel that has the logits


def draw_fits(vocabulary: int) -> bool:
    """Return whether tokens are drawn by the kernel. It must then draw for every batch, or a seeded text would depend
    on its neighbours."""
    return on_cuda() and vocabulary % 8 == 0


def launch_draw(
    logits: mx.array, sequences: SequenceArrays, lengths: mx.array, rounds: mx.array, purpose: int, ahead: int = 0
) -> Draws:
    """Draw a token from each row of logits [B, W, V], for positions from `ahead` + 1 after `lengths` [B] on, in
    `rounds` [B]. Purposes of noise are 0 to draft, and 2 to choose."""
    B, W, V = logits.shape
    parts = max(1, min(PARTS, PARTS * ROWS // (B * W)))
    grid = {"grid": (parts * THREADS, B * W, 1), "threadgroup": (THREADS, 1, 1)}
    template = [("T", logits.dtype), ("V", V), ("THREADS", THREADS)]
    (work,) = _survey_kernel()(
        inputs=[logits], template=template, output_shapes=[(B * W, WORK)], output_dtypes=[mx.uint32], **grid
    )
    made = _draw_kernel()(
        inputs=[logits, work, *sequences, lengths, rounds, _constant(ahead)],
        template=[*template, ("PURPOSE", purpose)],
        output_shapes=[(B, W), (B, W), (B, W, 4)],
        output_dtypes=[mx.int32, mx.int32, mx.uint32],
        **grid,
    )
    return Draws(*made)


@cache
def _constant(number: int) -> mx.array:
    made = mx.full((1024,), number, mx.int32)  # not so small that it would be in memory that the host shares
    mx.eval(made)
    return made


FILES = ("tensor_core", "team", "norm", "noise", "sampling")


@cache
def _survey_kernel() -> Any:
    return cuda_kernel(
        name="survey_rows",
        input_names=["logits"],
        output_names=["work"],
        header=include(*FILES) + launch_bounds(THREADS),
        source="headstart::survey_row<THREADS>(logits, V, work);",
    )


@cache
def _draw_kernel() -> Any:
    inputs, outputs = ["params", "words", "lengths", "rounds", "ahead"], ["token", "finite", "cuts"]
    return cuda_kernel(
        name="draw_tokens",
        input_names=["logits", "work", *inputs],
        output_names=outputs,
        header=include(*FILES) + launch_bounds(THREADS),
        source="headstart::draw_row<THREADS>(logits, V, logits_shape[1], const_cast<unsigned*>(work),\n"
        f"    {', '.join(inputs)}, PURPOSE, {', '.join(outputs)});",
    )
