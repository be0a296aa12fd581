"""Hash what random numbers are made of, in one launch instead of a hundred operations (see noise.cu)."""

from functools import cache
from typing import Any

import mlx.core as mx

from .compiler import cuda_kernel
from .device import include

THREADS = 256


def launch_noise_keys(
    keys: tuple[mx.array, mx.array], rounds: mx.array, purposes: mx.array, positions: mx.array
) -> tuple[mx.array, mx.array]:
    """Return keys [B, P, W] derived from keys [B], a round [B], purposes [B, P] and positions [B, W]."""
    (B, P), W = purposes.shape, positions.shape[1]
    first, second = _keys_kernel()(
        inputs=[*keys, rounds, purposes, positions],
        template=[],
        grid=(-(-B * P * W // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(B, P, W)] * 2,
        output_dtypes=[mx.uint32] * 2,
    )
    return first, second


def launch_noise_words(keys: tuple[mx.array, mx.array], ids: mx.array) -> mx.array:
    """Return a word for each of the ids [..., C] of keys [...], or [C] of all keys."""
    shape, shared = (*keys[0].shape, ids.shape[-1]), ids.ndim == 1
    made: list[mx.array] = _words_kernel()(
        inputs=[*[each.reshape(-1) for each in keys], ids if shared else ids.reshape(-1, ids.shape[-1])],
        template=[("SHARED", int(shared))],
        grid=(-(-keys[0].size * shape[-1] // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.uint32],
    )
    return made[0]


@cache
def _keys_kernel() -> Any:
    arguments = "first, second, rounds, purposes, positions, new_first, new_second"
    return cuda_kernel(
        name="noise_keys",
        input_names=["first", "second", "rounds", "purposes", "positions"],
        output_names=["new_first", "new_second"],
        header=include("noise"),
        source=f"headstart::noise_keys(purposes_shape[0], purposes_shape[1], positions_shape[1], {arguments});",
    )


@cache
def _words_kernel() -> Any:
    return cuda_kernel(
        name="noise_words",
        input_names=["first", "second", "ids"],
        output_names=["words"],
        header=include("noise"),
        source="headstart::noise_words(\n"
        "    first_shape[0], ids_shape[ids_ndim - 1], SHARED, first, second, ids, words);",
    )
