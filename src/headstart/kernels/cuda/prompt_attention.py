"""Attention of a prompt's pass, whose rows depend on nothing but themselves (see prompt_attention.cu)."""

import math
from functools import cache

import mlx.core as mx

from .compiler import cuda_kernel
from .device import device_attribute, include, launch_bounds

ROWS, KEYS, PANEL, THREADS = 128, 64, 64, 256  # as in prompt_attention.cu


def launch_prompt_attention(
    queries: mx.array,
    gates: mx.array | None,
    keys: mx.array,
    values: mx.array,
    offset: mx.array,
    scale: float,
    reach: int,
    window: int | None = None,
) -> mx.array:
    """Queries [B, H, W, D] over whole buffers of keys and values [B, Hkv, S, D] → [B, W, H·D], times the sigmoid of
    the second half of each head of `gates` [B, W, H·2·D].

    Query w of row b sees the positions up to `offset[b] + w` less than `window` away; none is beyond `reach`.
    W is any number.
    """
    B, H, W, D = queries.shape
    Hkv = keys.shape[1]
    template = [("T", queries.dtype), ("H", H), ("HKV", Hkv), ("D", D), ("WINDOW", window or 0)]
    (out,) = _kernel(scale, D, gates is not None)(
        inputs=[queries, keys, values, *([] if gates is None else [gates]), offset],
        template=[*template, ("WARPGROUPS", int(multiplies_in_warpgroups()))],
        grid=(THREADS * -(-H // Hkv * W // ROWS), Hkv, B),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(B, W, H * D)],
        output_dtypes=[queries.dtype],
    )
    return out


def multiplies_in_warpgroups() -> bool:
    """Return whether the device has the products of warpgroup.cu: compute capability 9."""
    return device_attribute(75) == 9


def shared_bytes(D: int) -> int:
    """Return the shared memory of a block, which a device may not have (`device_attribute(97)`)."""
    return 2 * -(-D // PANEL) * PANEL * (ROWS + 4 * KEYS)


@cache
def _kernel(scale: float, D: int, gated: bool):  # type: ignore[no-untyped-def]
    gates = "gates" if gated else "static_cast<const T*>(nullptr)"
    return cuda_kernel(
        name=f"prompt_attention{'_gated' * gated}",
        input_names=["queries", "keys", "values", *["gates"] * gated, "offset"],
        output_names=["out"],
        source=f"""
            extern __shared__ __align__(1024) unsigned char dynamic_shared[];
            headstart::attend_prompt<H, HKV, D, bool(WARPGROUPS)>(
                dynamic_shared, gridDim.x - 1 - blockIdx.x, blockIdx.y, blockIdx.z, queries, {gates}, keys, values,
                offset, {scale * math.log2(math.e)!r}f, queries_shape[2], keys_shape[2], WINDOW, out);
        """,
        header=include("tensor_core", "warpgroup", "prompt_attention") + launch_bounds(THREADS),
        shared_memory=shared_bytes(D),
    )
