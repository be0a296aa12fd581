"""Greedy decoding after the logits: one kernel finds the best tokens, one accepts drafts (see greedy.cu)."""

from functools import cache
from typing import Any

import mlx.core as mx

from ...sampling import BatchContext, Choice, Verdict
from .compiler import cuda_kernel
from .device import include, launch_bounds

THREADS = 1024  # that share a row of logits
PAIRS = (8, 32)  # of numbers for the host: each count is a kernel of its own


def best_fits(logits: mx.array) -> bool:
    return logits.dtype in (mx.bfloat16, mx.float16) and logits.shape[-1] % 8 == 0


def launch_best(logits: mx.array) -> Choice:
    """Return the best tokens of logits [..., V]."""
    shape = logits.shape[:-1]
    made = _best_kernel()(
        inputs=[logits],
        template=[("T", logits.dtype), ("V", logits.shape[-1]), ("THREADS", THREADS)],
        grid=(logits.size // logits.shape[-1] * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape] * 2,
        output_dtypes=[mx.int32] * 2,
    )
    return Choice(*made)


def launch_accept(choice: Choice, window: mx.array, max_k: mx.array, context: BatchContext) -> Verdict:
    """Accept the drafts of a window [B, W], all but its first token, while they are the chosen tokens."""
    B, W = window.shape
    where = context.lengths, context.remaining, context.rounds
    made = _accept_kernel()(
        inputs=[*choice[:2], max_k if choice.most is None else choice.most, window, max_k, *where],
        template=[],
        grid=(-(-B // 32) * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(B,)] * 8 + [(B, W)],
        output_dtypes=[mx.int32] * 9,
    )
    return Verdict(choice.tokens, *made)


def launch_starts(lengths: mx.array, counts: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the last of `counts` [B] pairs after `lengths` [B], and where k drafts begin (see `draft_starts`)."""
    B = lengths.size
    last, starts = _starts_kernel()(
        inputs=[lengths, counts],
        template=[],
        grid=(-(-B // 32) * 32, k, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(B,), (k, B)],
        output_dtypes=[mx.int32] * 2,
    )
    return last, starts


def launch_columns(arrays: list[mx.array], for_host: bool = False) -> list[mx.array]:
    """Return arrays [B, ...] or [1, ...] of int32 side by side, as one array. A few numbers that are `for_host` are
    pairs, of which the last mean nothing."""
    B, width = max(each.shape[0] for each in arrays), sum(each.shape[1] for each in arrays)
    pairs = for_host and B * width <= 2 * PAIRS[-1]
    pieces = next(count for count in PAIRS if B * width <= 2 * count) if pairs else 1
    made: list[mx.array] = _columns_kernel(len(arrays), pieces, for_host)(
        inputs=arrays,
        template=[],
        grid=(-(-B // 32) * 32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(2,)] * pieces if pairs else [(B, width)],
        output_dtypes=[mx.int32] * pieces,
    )
    return made


@cache
def _best_kernel() -> Any:
    return cuda_kernel(
        name="best_token",
        input_names=["logits"],
        output_names=["token", "finite"],
        header=include("tensor_core", "team", "operand", "norm", "greedy") + launch_bounds(THREADS),
        source="headstart::best_token<THREADS>(logits, V, token, finite);",
    )


@cache
def _accept_kernel() -> Any:
    inputs = ["best", "finite_each", "most", "window", "max_k", "lengths", "remaining", "rounds"]
    outputs = [f"new_{name}" if name in inputs else name for name in Verdict._fields[1:]]
    return cuda_kernel(
        name="accept_drafts",
        input_names=inputs,
        output_names=outputs,
        header=include("tensor_core", "team", "operand", "norm", "greedy"),
        source=f"headstart::accept_drafts(window_shape[0], window_shape[1], {', '.join(inputs + outputs)});",
    )


@cache
def _starts_kernel() -> Any:
    return cuda_kernel(
        name="draft_starts",
        input_names=["lengths", "counts"],
        output_names=["last", "starts"],
        header=include("tensor_core", "team", "operand", "norm", "greedy"),
        source="headstart::draft_starts(lengths_shape[0], lengths, counts, last, starts);",
    )


@cache
def _columns_kernel(count: int, pieces: int, read_by_host: bool) -> Any:
    columns = ", ".join(f"{{c{i}, c{i}_shape[0], c{i}_shape[1]}}" for i in range(count))
    outputs = [f"out{i}" for i in range(pieces)]
    return cuda_kernel(
        name=f"join_columns_{count}_{pieces}",
        input_names=[f"c{i}" for i in range(count)],
        output_names=outputs,
        header=include("tensor_core", "team", "operand", "norm", "greedy"),
        source=f"const headstart::Columns all[] = {{{columns}}}; int* const out[] = {{{', '.join(outputs)}}};\n"
        "headstart::join_columns(all, out);",
        read_by_host=read_by_host,
    )
