"""Draw tokens from rows of logits in two launches, three with truncation, and verify drafts (see sampling.cu)."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from ...sampling import Sampler
from .compiler import cuda_kernel
from .device import include, launch_bounds
from .greedy import launch_columns

THREADS = 1024  # of a block
PARTS = 16  # blocks that share a row, at most
ROWS = 64  # that have so many; more rows have fewer
DRAFTS = 8  # rows of drafts that are arrays of their own, at most
WORK = 2 * (8 + 16 + 2 * 1024)  # words of memory that a row's blocks share


class Draws(NamedTuple):
    tokens: mx.array  # [B, W] int32
    finite: mx.array  # [B, W] int32, 0 where a logit is NaN or the largest infinite
    cuts: mx.array  # [B, W, 4] int32, what each was drawn from, for a kernel that has the logits
    work: mx.array


def draw_fits(vocabulary: int) -> bool:
    """Return whether tokens are drawn by the kernel. It must then draw for every batch, or a seeded text would depend
    on its neighbours."""
    return vocabulary % 8 == 0


def launch_draw(logits: mx.array, sampler: Sampler, draft: int | None = None) -> Draws:
    """Draw a token from each row of logits [B, W, V], for the next positions: those of the target itself, or from
    number `draft` on."""
    B, W, _ = logits.shape
    parts = max(1, min(PARTS, PARTS * ROWS // (B * W)))
    grid = {"grid": (parts * THREADS, B * W, 1), "threadgroup": (THREADS, 1, 1)}
    template = [("T", logits.dtype), ("THREADS", THREADS)]
    (work,) = _survey_kernel()(
        inputs=[logits], template=template, output_shapes=[(B * W, WORK)], output_dtypes=[mx.uint32], **grid
    )
    ends = work  # not read
    if sampler.truncates:
        (ends,) = _cut_kernel()(
            inputs=[logits, work, sampler.params],
            template=template,
            output_shapes=[(B * W, 2)],
            output_dtypes=[mx.uint32],
            **grid,
        )
    tokens, finite, cuts = _draw_kernel()(
        inputs=[logits, work, ends, *sampler[:4], _constant(-1 if draft is None else draft)],
        template=template,
        output_shapes=[(B, W), (B, W), (B, W, 4)],
        output_dtypes=[mx.int32] * 3,
        **grid,
    )
    return Draws(tokens, finite, cuts, work)


def join_cuts(cuts: list[mx.array]) -> mx.array:
    """Return cuts [B, n, 4] of some drafts each as those of all, [B, k, 4]."""
    return launch_columns([each.reshape(each.shape[0], -1) for each in cuts])[0].reshape(cuts[0].shape[0], -1, 4)


def launch_ratio(
    logits: mx.array,
    drawn: Draws,
    window: mx.array,
    sources: Sequence[tuple[mx.array, ...]],
    sampler: Sampler,
    max_k: mx.array,
    remaining: mx.array,
) -> tuple[mx.array, mx.array]:
    """Verify the drafts of a window [B, W] against the target's logits [B, W, V], from which `drawn` tokens were.

    A source is the logits of some drafts, [B, 1, V] of each or [B, W, V] of all, and then their cuts [B, n, 4].

    Returns tokens [B, W] and how many of the drafts are the first of them, [B]: W where the rule is another one.
    """
    B, W = window.shape
    rows = [logits for *several, _ in sources for logits in several]
    rows = rows if len(rows) <= DRAFTS else [mx.concatenate(rows, axis=1)]
    cuts = sources[0][-1] if len(sources) == 1 else join_cuts([each for *_, each in sources])
    parts = max(1, min(PARTS, PARTS * ROWS // (B * W)))
    tokens, most = _ratio_kernel()(
        inputs=[logits, drawn.work, *sampler[:4], drawn.tokens, drawn.cuts, window, max_k, remaining, cuts,
                *rows, *rows[:1] * (DRAFTS - len(rows))],
        template=[("T", logits.dtype), ("Q", rows[0].dtype), ("THREADS", THREADS)],
        grid=(parts * THREADS, W - 1, B),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(B, W), (B,)],
        output_dtypes=[mx.int32] * 2,
    )  # fmt: skip
    return tokens, most


def describe_sampling(logits: mx.array) -> None:
    """Have the kernels of sampling compiled, where they are used, for logits [B, W, V] of this type."""
    B = logits.shape[0]
    if not draw_fits(logits.shape[-1]):
        return
    some, words = mx.zeros((B,), mx.int32), mx.zeros((B, 6), mx.uint32)
    sampler = Sampler(mx.zeros((B, 5)), words, some, some, truncates=True)
    drawn = launch_draw(logits, sampler)
    launch_ratio(logits, drawn, drawn.tokens, [(logits, drawn.cuts)], sampler, some, some)


@cache
def _constant(number: int) -> mx.array:
    return mx.array([number] * 1024, mx.int32)  # not so small that it would be in memory that the host shares


FILES = ("tensor_core", "team", "operand", "norm", "noise", "sampling", "truncation", "ratio")


@cache
def _survey_kernel() -> Any:
    return cuda_kernel(
        name="survey_rows",
        input_names=["logits"],
        output_names=["work"],
        header=include(*FILES) + launch_bounds(THREADS),
        source="headstart::survey_row<THREADS>(logits, logits_shape[2], work);",
    )


@cache
def _cut_kernel() -> Any:
    return cuda_kernel(
        name="cut_rows",
        input_names=["logits", "work", "params"],
        output_names=["ends"],
        header=include(*FILES) + launch_bounds(THREADS),
        source="headstart::cut_row<THREADS>(\n"
        "    logits, logits_shape[2], logits_shape[1], const_cast<unsigned*>(work), params, ends);",
    )


@cache
def _draw_kernel() -> Any:
    inputs, outputs = ["ends", "params", "words", "lengths", "rounds", "draft"], ["token", "finite", "cuts"]
    return cuda_kernel(
        name="draw_tokens",
        input_names=["logits", "work", *inputs],
        output_names=outputs,
        header=include(*FILES) + launch_bounds(THREADS),
        source="headstart::draw_row<THREADS>(logits, logits_shape[2], logits_shape[1], const_cast<unsigned*>(work),\n"
        f"    {', '.join(inputs + outputs)});",
    )


@cache
def _ratio_kernel() -> Any:
    inputs = ["params", "words", "lengths", "rounds", "drawn", "cuts", "window", "max_k", "remaining", "draft_cuts"]
    rows = [f"rows{n}" for n in range(DRAFTS)]
    return cuda_kernel(
        name="verify_by_ratio",
        input_names=["logits", "work", *inputs, *rows],
        output_names=["tokens", "most"],
        header=include(*FILES) + launch_bounds(THREADS),
        source=f"const Q* const rows[] = {{{', '.join(rows)}}};\n"
        "headstart::verify_by_ratio<THREADS>(logits, logits_shape[2], logits_shape[1], const_cast<unsigned*>(work),\n"
        f"    {', '.join(inputs)}, rows, rows0_shape[1], tokens, most);",
    )
