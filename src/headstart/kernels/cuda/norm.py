"""RMS norm with a float32 weight, with the addition before it: one kernel where stock ops take four."""

from functools import cache
from typing import Any

import mlx.core as mx

from .compiler import cuda_kernel
from .device import include


def norm_fits(x: mx.array, weight: mx.array) -> bool:
    sizes = x.shape[-1] % 8 == 0 and x.shape[-1] <= 8192
    return sizes and x.dtype in (mx.bfloat16, mx.float16) and weight.dtype == mx.float32


def norm_threads(size: int) -> int:
    """Return how many threads share a row: their number is the order in which it is summed."""
    return min(256, -(-size // 256) * 32)


def launch_norm(adds: bool, eps: float, inputs: list[mx.array]) -> list[mx.array]:
    """Norm `inputs` x and weight; where it `adds`, x, what is added and weight → the sum and its norm."""
    x, count = inputs[0], 1 + adds
    size = x.shape[-1]
    threads = norm_threads(size)
    made: list[mx.array] = _norm_kernel(adds, eps)(
        inputs=inputs,
        template=[("T", x.dtype), ("D", size), ("THREADS", threads)],
        grid=(x.size // size * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape] * count,
        output_dtypes=[x.dtype] * count,
    )
    return made


@cache
def _norm_kernel(adds: bool, eps: float) -> Any:
    added, total = ("added", "total") if adds else ("static_cast<const T*>(nullptr)", "static_cast<T*>(nullptr)")
    return cuda_kernel(
        name="add_and_norm" if adds else "norm",
        input_names=["x", *["added"] * adds, "weight"],
        output_names=[*["total"] * adds, "normed"],
        header=include("tensor_core", "team", "operand", "norm"),
        source=f"headstart::norm<D, THREADS, {str(adds).lower()}>(x, {added}, weight, {eps!r}f, {total}, normed);",
    )
