"""Attention of a prompt's pass, whose rows depend on nothing but themselves (see prompt_attention.cu)."""

import math
from functools import cache

import mlx.core as mx

from .compiler import cuda_kernel
from .device import device_attribute, include, launch_bounds, multiprocessors

SOURCES = ("tensor_core", "warpgroup", "prompt_tiles", "prompt_softmax", "prompt_attention")
ROWS, KEYS, PANEL, THREADS = 128, 64, 64, 256  # as in prompt_tiles.cu
PIECE = 8192  # positions that are summed up from nothing. Every query's bits depend on it
MOST_APART = 2048  # blocks that leave their sums in memory, 128 KB each where heads have 256 elements


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
    Hkv, pieces = keys.shape[1], -(-reach // PIECE)
    tiles = -(-(H // Hkv) * W // ROWS)
    blocks = tiles * Hkv * B
    apart = computed_apart(blocks, pieces)
    kept = blocks * pieces if apart else blocks if pieces > 1 else 0
    template = [("T", queries.dtype), ("H", H), ("HKV", Hkv), ("D", D)]
    template += [("PIECE", PIECE // KEYS), ("WINDOW", window or 0)]
    gated, made = [] if gates is None else [gates], (B, W, H * D)
    out, parts = _attend(scale, D, gates is not None)(
        inputs=[queries, keys, values, *gated, offset],
        template=[*template, ("WARPGROUPS", int(multiplies_in_warpgroups()))],
        grid=(THREADS * tiles, Hkv, B * pieces if apart else B),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(1,) if apart else made, (max(kept, 1), D // 8 + 1, THREADS, 4)],
        output_dtypes=[queries.dtype, mx.float32],
    )
    if not apart:
        return out
    (out,) = _add(scale, gates is not None)(
        inputs=[queries, parts, *gated, offset],
        template=template,
        grid=(THREADS * tiles, Hkv, B),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[made],
        output_dtypes=[queries.dtype],
    )
    return out


def computed_apart(blocks: int, pieces: int) -> bool:
    """Return whether pieces are better computed side by side than one after the other, by the rounds in which the
    device's multiprocessors take the blocks. It changes no bit."""
    rounds, rounds_apart = (-(-count // multiprocessors()) for count in (blocks, blocks * pieces))
    return blocks * pieces <= MOST_APART and 1.1 * rounds_apart < rounds * pieces


def multiplies_in_warpgroups() -> bool:
    """Return whether the device has the products of warpgroup.cu: compute capability 9."""
    return device_attribute(75) == 9


def tile_bytes(D: int) -> int:
    """Return the shared memory of a block, which a device may not have (`device_attribute(97)`)."""
    return 2 * -(-D // PANEL) * PANEL * (ROWS + 4 * KEYS)


@cache
def _attend(scale: float, D: int, gated: bool):  # type: ignore[no-untyped-def]
    gates = "gates" if gated else "static_cast<const T*>(nullptr)"
    return cuda_kernel(
        name=f"prompt_attention{'_gated' * gated}",
        input_names=["queries", "keys", "values", *["gates"] * gated, "offset"],
        output_names=["out", "parts"],
        source=f"""
            extern __shared__ __align__(1024) unsigned char dynamic_shared[];
            const int pieces = gridDim.z / queries_shape[0], tile = gridDim.x - 1 - blockIdx.x;  // the longest first
            headstart::attend_prompt<H, HKV, D, PIECE, bool(WARPGROUPS)>(
                dynamic_shared, tile, blockIdx.y, blockIdx.z / pieces, pieces == 1 ? -1 : blockIdx.z % pieces,
                tile + gridDim.x * (blockIdx.y + HKV * blockIdx.z), queries, {gates}, keys, values, offset,
                {scale * math.log2(math.e)!r}f, queries_shape[2], keys_shape[2], WINDOW, out, parts);
        """,
        header=include(*SOURCES) + launch_bounds(THREADS),
        shared_memory=tile_bytes(D),
    )


@cache
def _add(scale: float, gated: bool):  # type: ignore[no-untyped-def]
    gates = "gates" if gated else "static_cast<const T*>(nullptr)"
    return cuda_kernel(
        name=f"prompt_attention_add{'_gated' * gated}",
        input_names=["queries", "parts", *["gates"] * gated, "offset"],
        output_names=["out"],
        source=f"""
            const int stride = gridDim.x * HKV, pieces = parts_shape[0] / (stride * queries_shape[0]);
            headstart::add_pieces<H, HKV, D, PIECE>(
                blockIdx.x, blockIdx.y, blockIdx.z, blockIdx.x + gridDim.x * (blockIdx.y + HKV * pieces * blockIdx.z),
                stride, parts, {gates}, offset, {scale * math.log2(math.e)!r}f, queries_shape[2], WINDOW, out);
        """,
        header=include(*SOURCES) + launch_bounds(THREADS),
    )
