"""The gated delta rule over a prompt's pass, in chunks of 64 tokens on tensor cores (see delta_chunks.cu).

A token's output and the state after each whole chunk depend on the tokens up to there alone. Chunks are counted from
the pass's first token, so a prompt that is cut at multiples of 64 gets the same bits.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from ..types import GatedDeltaWeights, Ran, Window
from .compiler import cuda_kernel
from .device import device_attribute, include, launch_bounds, multiprocessors

CHUNK, CELLS = 64, 10  # as in delta_tokens.cu
SOURCES = ("tensor_core", "team", "operand", "gated_delta", "delta_tokens", "delta_triangle", "delta_chunks")


def delta_chunks_fit(state: mx.array, dtype: mx.Dtype, taps: int) -> bool:
    """Return whether `launch_delta_chunks` takes a state of this shape, and a convolution of so many taps, on this
    device."""
    _, _, Dv, Dk = state.shape
    fits = Dk == Dv and Dk in (64, 128) and 2 <= taps <= 8 and dtype in (mx.bfloat16, mx.float16)
    return fits and device_attribute(97) >= chunk_bytes(Dk) and device_attribute(75) >= 8


def launch_delta_chunks(window: Window, weights: GatedDeltaWeights, state: mx.array, conv: mx.array) -> Ran:
    """Run a window [B, W] whose tokens are all certain, of any width W."""
    (B, W, C), dtype = window.qkv.shape, window.qkv.dtype
    _, Hv, D, _ = state.shape
    Hk, taps, chunks = (C // D - Hv) // 2, weights.conv.shape[1], -(-W // CHUNK)
    heads = [("T", dtype), ("HK", Hk), ("HV", Hv), ("D", D)]
    tokens, values, conv = _prepare()(
        inputs=[window.qkv, conv, weights.conv],
        template=[*heads, ("TAPS", taps)],
        grid=(256 * (2 * Hk + Hv), chunks, B),
        threadgroup=(256, 1, 1),
        output_shapes=[(B, chunks, 2 * Hk, CHUNK, D), (B, chunks, Hv, CHUNK // 8, D, 8), conv.shape],
        output_dtypes=[dtype] * 3,
    )
    cells, decays = _triangle(D)(
        inputs=[tokens, window.b, window.a, weights.A_log, weights.dt_bias],
        template=heads,
        grid=(128 * Hv, chunks, B),
        threadgroup=(128, 1, 1),
        output_shapes=[(B, chunks, Hv, 3, CELLS, 32, 4), (B, chunks, Hv, 2, CHUNK)],
        output_dtypes=[mx.uint32, mx.float32],
    )
    warps = 2 if B * Hv * D // 32 <= multiprocessors() else 4
    outputs, state = _chunks(D)(
        inputs=[tokens, values, cells, decays, window.z, state],
        template=[*heads, ("WARPS", warps)],
        grid=(2 * D * Hv, B, 1),
        threadgroup=(32 * warps, 1, 1),
        output_shapes=[(B, W, Hv, D), state.shape],
        output_dtypes=[dtype, mx.float32],
    )
    (y,) = _finish(weights.eps)(
        inputs=[outputs, window.z, weights.norm],
        template=[("T", dtype), ("D", D)],
        grid=(256 * -(-B * W * Hv // 32), 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(B, W, Hv, D)],
        output_dtypes=[dtype],
    )
    return Ran(y, state, conv, None)


def chunk_bytes(D: int) -> int:
    """Return the shared memory of a block of the recurrence: queries, keys, cells and decays of two chunks."""
    return 2 * (2 * CHUNK * D * 2 + 3 * CELLS * 32 * 16 + 2 * CHUNK * 4)


def triangle_bytes(D: int) -> int:
    """Return the shared memory of a chunk's triangle: queries, keys, and what is inverted."""
    return 2 * CHUNK * D * 2 + CHUNK * (CHUNK + 4) * 4 + 2 * CHUNK * 4


@cache
def _prepare() -> Any:
    return cuda_kernel(
        name="delta_tokens",
        input_names=["qkv", "conv", "conv_weight"],
        output_names=["tokens", "values", "new_conv"],
        source="""
            headstart::prepare_tokens<HK, HV, D, TAPS>(
                blockIdx.x, blockIdx.y, gridDim.y, blockIdx.z, qkv_shape[1], qkv, conv, conv_weight, tokens, values,
                new_conv);
        """,
        header=include(*SOURCES[:-2]) + launch_bounds(256),
    )


@cache
def _triangle(D: int) -> Any:
    return cuda_kernel(
        name="delta_triangle",
        input_names=["tokens", "b", "a", "A_log", "dt_bias"],
        output_names=["cells", "decays"],
        source="""
            extern __shared__ __align__(16) unsigned char dynamic_shared[];
            headstart::make_triangle<HK, HV, D>(
                *reinterpret_cast<headstart::TriangleRoom<D, T>*>(dynamic_shared), blockIdx.x, blockIdx.y, gridDim.y,
                blockIdx.z, b_shape[1], tokens, b, a, A_log, dt_bias, cells, decays);
        """,
        header=include(*SOURCES[:-1]) + launch_bounds(128, 4),
        shared_memory=triangle_bytes(D),
    )


@cache
def _chunks(D: int) -> Any:
    return cuda_kernel(
        name="delta_chunks",
        input_names=["tokens", "values", "cells", "decays", "z", "state"],
        output_names=["outputs", "new_state"],
        source="""
            extern __shared__ __align__(16) unsigned char dynamic_shared[];
            constexpr int SLICES = D / 16 / WARPS;
            headstart::run_chunks<HK, HV, D, WARPS>(
                *reinterpret_cast<headstart::ChunkRoom<D, T>*>(dynamic_shared), blockIdx.x / SLICES,
                blockIdx.x % SLICES * WARPS + threadIdx.x / 32, blockIdx.y, tokens_shape[1], z_shape[1], tokens,
                values, cells, decays, state, outputs, new_state);
        """,
        header=include(*SOURCES) + launch_bounds(128),
        shared_memory=chunk_bytes(D),
    )


@cache
def _finish(eps: float) -> Any:
    return cuda_kernel(
        name="delta_outputs",
        input_names=["outputs", "z", "norm_weight"],
        output_names=["y"],
        source=f"""
            const long long items = (long long)z_shape[0] * z_shape[1] * z_shape[2];
            headstart::norm_and_gate<D>(
                (blockIdx.x * 8ll + threadIdx.x / 32) * 4, items, outputs, z, norm_weight, {eps!r}f, y);
        """,
        header=include(*SOURCES[:-2]) + launch_bounds(256),
    )
