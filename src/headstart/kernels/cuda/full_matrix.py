"""Products of hundreds to thousands of rows: the matrix dequantised, and multiplied by cuBLAS.

cuBLAS chooses how it sums by the shape, so a row's bits may change with the number of rows. Rows are padded to
numbers for which they do not: which these are is tried for every shape of a matrix, once in a process.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..weights import NVFP4_MOST, MatrixWeights, matrix_weights
from .compiler import cuda_kernel
from .device import include
from .formats import Format, format_refusal

HEIGHTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # numbers of rows that are tried
THREADS = 256


def wide_product(x: mx.array, layer: nn.Module) -> mx.array:
    """Return `layer(x)` without bias, [..., K] → [..., N]: a row's bits depend on nothing but the row."""
    weights = matrix_weights(layer)
    matrix = full_matrix(weights, x.dtype)
    rows, at, parts = x.reshape(-1, x.shape[-1]), 0, []
    for height in parts_of(rows.shape[0], heights_of(weights.outputs, weights.inputs, x.dtype)):
        some = rows[at : at + height]
        missing = height - some.shape[0]
        some = mx.pad(some, [(0, missing), (0, 0)]) if missing else some
        parts.append((some @ matrix.T)[: height - missing])
        at += height
    made = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if "global_scale" in layer:
        made = (made.astype(mx.float32) * (layer["global_scale"] / NVFP4_MOST)).astype(x.dtype)
    return made.reshape(*x.shape[:-1], weights.outputs)


def parts_of(rows: int, heights: Sequence[int]) -> list[int]:
    """Return the heights of products that hold so many rows: the last may have some to spare."""
    parts: list[int] = []
    while rows > 0:
        enough = [height for height in heights if height >= rows]
        parts.append(enough[0] if enough else heights[-1])
        rows -= parts[-1]
    return parts


@cache
def heights_of(outputs: int, inputs: int, dtype: mx.Dtype) -> tuple[int, ...]:
    """Return the numbers of rows, ascending, among which the products with a matrix [N, K] keep each row's bits."""
    x = mx.random.normal((HEIGHTS[-1] * 3 // 2, inputs), key=mx.random.key(0)).astype(dtype)
    matrix = mx.random.normal((outputs, inputs), key=mx.random.key(1)).astype(dtype)
    made = {height: x[:height] @ matrix.T for height in HEIGHTS}
    moved = {height: x[height // 2 :][:height] @ matrix.T for height in HEIGHTS}  # a row's place counts too
    steady = [height for height in HEIGHTS if _same(moved[height], made[height][height // 2 :])]
    return largest_class(steady or list(HEIGHTS[-1:]), lambda a, b: _same(made[a], made[b]))


def largest_class(heights: list[int], same: Callable[[int, int], bool]) -> tuple[int, ...]:
    """Return the most heights that are the `same` as one another; of as many, those with the largest."""
    classes: list[list[int]] = []
    for height in heights:
        for each in classes:
            if same(each[0], height):
                each.append(height)
                break
        else:
            classes.append([height])
    return tuple(sorted(classes, key=lambda each: (len(each), each[-1]))[-1])


def _same(a: mx.array, b: mx.array) -> bool:
    rows = min(a.shape[0], b.shape[0])
    return bool(mx.array_equal(a[:rows], b[:rows]).item())


def full_matrix(weights: MatrixWeights, dtype: mx.Dtype) -> mx.array:
    """Return a matrix [N, K] as it is multiplied, in `dtype`."""
    if weights.scales is None:
        return weights.weight.astype(dtype)
    format, eights = replace(Format.of(weights), has_whole=False), weights.outputs * weights.inputs // 8
    if format_refusal(dtype, weights):
        how: Any = {"group_size": weights.group, "bits": weights.bits, "mode": weights.mode}
        return mx.dequantize(weights.weight, weights.scales, weights.biases, **how).astype(dtype)
    made: mx.array = _dequantise(format)(
        inputs=weights.arrays(),
        template=[("T", dtype)],
        grid=(-(-eights // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(weights.outputs, weights.inputs)],
        output_dtypes=[dtype],
    )[0]
    return made


@cache
def _dequantise(format: Format) -> Any:
    names = list(format.names(0).values())
    biases = names[2] if format.has_biases else "nullptr"
    return cuda_kernel(
        name=f"full_matrix_{format.mode}_{format.bits}_{format.group}",
        input_names=names,
        output_names=["out"],
        header=include("tensor_core", "codes", "full_matrix"),
        source=f"""
            const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
            if (i < (long long)s0_shape[0] * s0_shape[1] * {format.group} / 8)
              headstart::dequantise_eight<{format.text()}>(
                  reinterpret_cast<const unsigned char*>(w0), s0, {biases}, out, i);
        """,
    )
