"""RMS norm with a float32 weight, with the addition before it: one kernel where stock ops take four."""

from functools import cache
from typing import Any

import mlx.core as mx

from .device import launch, make_kernel, on_cuda


def norm_fits(x: mx.array, weight: mx.array) -> bool:
    sizes = x.shape[-1] % 8 == 0 and x.shape[-1] <= 8192
    return on_cuda() and sizes and x.dtype in (mx.bfloat16, mx.float16) and weight.dtype == mx.float32


def launch_norm(adds: bool, eps: float, inputs: list[mx.array]) -> list[mx.array]:
    """Norm `inputs` x and weight; where it `adds`, x, what is added and weight → the sum and its norm."""
    x = inputs[0]
    size = x.shape[-1]
    threads = min(256, -(-size // 256) * 32)
    template = {"T": x.dtype, "D": size, "THREADS": threads}
    outputs = [(x.shape, x.dtype)] * (1 + adds)
    return launch(_norm_kernel(adds, eps), inputs, template, (x.size // size, 1, 1), threads, outputs)


@cache
def _norm_kernel(adds: bool, eps: float) -> Any:
    added, total = ("added", "total") if adds else ("static_cast<const T*>(nullptr)", "static_cast<T*>(nullptr)")
    call = f"headstart::norm<D, THREADS>(x, {added}, weight, {eps!r}f, {total}, normed);"
    names = ("add_and_norm", "x added weight", "total normed") if adds else ("norm", "x weight", "normed")
    return make_kernel(*names, "norm", call)
