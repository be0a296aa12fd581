"""RMS norm with a float32 weight, with the addition before it: one kernel where stock ops take four."""

from functools import cache
from typing import Any

import mlx.core as mx

from . import cpu
from .cuda import include, on_cuda


def norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """[..., D] → [..., D] in the type of `x`."""
    if (native := cpu.native()) is not None and x.dtype in cpu.TYPES:
        return native.norm(x, weight, eps)[0]
    if not _fits(x, weight):
        return mx.fast.rms_norm(x, weight, eps).astype(x.dtype)
    return _run(False, eps, [x, weight])[0]


def add_and_norm(x: mx.array, added: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """x + added, and its norm."""
    if (native := cpu.native()) is not None and x.dtype in cpu.TYPES:
        total, normed = native.norm(x, weight, eps, added)
        return total, normed
    if not _fits(x, weight):
        total = x + added
        return total, norm(total, weight, eps)
    total, normed = _run(True, eps, [x, added, weight])
    return total, normed


def _fits(x: mx.array, weight: mx.array) -> bool:
    sizes = x.shape[-1] % 8 == 0 and x.shape[-1] <= 8192
    return on_cuda() and sizes and x.dtype in (mx.bfloat16, mx.float16) and weight.dtype == mx.float32


def _run(adds: bool, eps: float, inputs: list[mx.array]) -> list[mx.array]:
    x, count = inputs[0], 1 + adds
    size = x.shape[-1]
    threads = min(256, -(-size // 256) * 32)
    return _kernel(adds, eps)(
        inputs=inputs,
        template=[("T", x.dtype), ("D", size), ("THREADS", threads)],
        grid=(x.size // size * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape] * count,
        output_dtypes=[x.dtype] * count,
    )


@cache
def _kernel(adds: bool, eps: float) -> Any:
    added, total = ("added", "total") if adds else ("static_cast<const T*>(nullptr)", "static_cast<T*>(nullptr)")
    return mx.fast.cuda_kernel(
        name="add_and_norm" if adds else "norm",
        input_names=["x", *["added"] * adds, "weight"],
        output_names=[*["total"] * adds, "normed"],
        header=include("norm"),
        source=f"headstart::norm<D, THREADS>(x, {added}, weight, {eps!r}f, {total}, normed);",
    )
