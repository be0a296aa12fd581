"""Experts of a prompt's rows: the rows sorted by expert, and each expert's weights read once for 64 or 128 of them.
They stay as they are quantised (see prompt_experts.cu).

A row's result depends on the row and its experts alone: not on how many rows there are, which, or in what order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu

from ..weights import MatrixWeights
from .compiler import cuda_kernel
from .device import include, launch_bounds
from .formats import Format, arrays_of, format_refusal
from .products import name_suffix
from .prompt_attention import multiplies_in_warpgroups

CHUNK = 64  # positions along K that are taken at a time
SORTERS = 1024  # threads of the block that sorts: no model has more experts


@dataclass(frozen=True)
class PromptTile:
    """What a block multiplies at a time. Only `warpgroups` may change what it makes, by rounding."""

    warps: int = 8  # each has 32 rows of weights
    tokens: int = 64  # rows of x that chose the same expert, at most
    stages: int = 4  # spans under way and in use
    blocks: int = 2  # at a time on a multiprocessor
    depth: int = 2048  # positions over which a block sums for the same rows of x before it ends
    span: int = 64  # positions along K that are copied at a time
    warpgroups: bool = False  # four warps multiply together, by what Hopper cards have for that


def prompt_experts_refusal(dtype: mx.Dtype, weights: MatrixWeights) -> str | None:
    """Return why `prompt_experts` does not take these weights [E, N, K]; None where it does."""
    if refusal := format_refusal(dtype, weights):
        return refusal
    if weights.weight.shape[0] > SORTERS:
        return f"more than {SORTERS} experts"
    if weights.inputs % CHUNK or weights.outputs % 32:
        return f"{weights.inputs} → {weights.outputs}: no multiples of {CHUNK} and 32"
    return None


def prompt_experts(
    x: mx.array,
    indices: mx.array,
    gate: MatrixWeights,
    up: MatrixWeights,
    down: MatrixWeights,
    activation: Callable[[mx.array, mx.array], mx.array] | None = None,
) -> mx.array:
    """Return what each expert in `indices` [..., top] makes of a row of x [..., K], [..., top, N]:
    `down(activation(up, gate))`, where None is mlx-lm's `swiglu`."""
    top = indices.shape[-1]
    rows, pairs = x.reshape(-1, x.shape[-1]), indices.reshape(-1, top).astype(mx.uint32)
    tile = choose_tile(gate.bits)  # with as many tokens for any number of bits
    order, tiles, arranged = launch_sort(rows, pairs, gate, tile)
    alike = Format.of(gate) == Format.of(up)
    if activation is None and alike:
        hidden = launch_prompt_product(arranged, order, tiles, [gate, up], tile, share=top, arranged=down.bits)
    else:  # of elements alone, whose order does not matter
        opened = launch_prompt_product(arranged, order, tiles, [gate], tile, share=top, arranged=down.bits)
        arranged = arranged if alike else launch_sort(rows, pairs, up, tile)[2]
        tile = choose_tile(up.bits)
        raised = launch_prompt_product(arranged, order, tiles, [up], tile, share=top, arranged=down.bits)
        hidden = (activation or (lambda up, gate: swiglu(gate, up)))(raised, opened)
    made = launch_prompt_product(hidden, order, tiles, [down], choose_tile(down.bits))
    return made.reshape(*indices.shape, down.outputs)


def choose_tile(bits: int) -> PromptTile:
    """Return the tile for weights in so many bits on this device."""
    if mx.cuda.is_available() and multiplies_in_warpgroups():
        stages, span = (4 if bits <= 4 or bits == 16 else 3), (128 if bits < 16 else 64)
        return PromptTile(8, 128, stages, blocks=1, span=span, warpgroups=True)
    return PromptTile(stages=4 if bits <= 4 else 3 if bits < 16 else 2)


def launch_sort(
    x: mx.array, indices: mx.array, weights: MatrixWeights, tile: PromptTile
) -> tuple[mx.array, mx.array, mx.array]:
    """Sort the pairs of a row and an expert in `indices` [R, top] by expert, and arrange x [R, K] for the product of
    these weights → the pairs' numbers, what each block has to do, and x."""
    experts, pairs = weights.weight.shape[0], indices.size
    most = min(experts, pairs) + pairs // tile.tokens  # tiles that there may be
    arranges = weights.bits < 16
    blocks = min(-(-x.size // 8 // SORTERS), 512) if arranges else 0
    made = _sort(arranges)(
        inputs=[indices, x] if arranges else [indices],
        template=[("EXPERTS", experts), ("TOKENS", tile.tokens), ("BITS", weights.bits)],
        grid=((1 + blocks) * SORTERS, 1, 1),
        threadgroup=(SORTERS, 1, 1),
        output_shapes=[(pairs,), (most, 3), *([x.shape] if arranges else [])],
        output_dtypes=[mx.int32, mx.int32, *([x.dtype] if arranges else [])],
    )
    order, tiles = made[:2]
    return order, tiles, made[2] if arranges else x


def launch_prompt_product(
    x: mx.array,
    order: mx.array,
    tiles: mx.array,
    weights: list[MatrixWeights],
    tile: PromptTile,
    share: int = 0,
    arranged: int = 0,
) -> mx.array:
    """Multiply rows of x [·, K], arranged, by the experts that `launch_sort` found for them.

    Args:
        weights: One, or a gate and its `up`: then `silu(gate) * up` is returned.
        share: Pair p has row p / share of x, and the products are left sorted. Where it is 0 the rows are sorted
            already, and the products are left as the pairs were.
        arranged: The bits of the weights that the products are input to, or 0.
    """
    first, gated, format = weights[0], len(weights) == 2, Format.of(weights[0])
    bits, rows = first.bits, 32 * tile.warps
    span = tile.span if first.inputs % tile.span == 0 else CHUNK
    piece, pieces = 0, 0
    if format.scale is not None:
        size = format.scale.size
        row_bytes = first.inputs // first.group * size
        piece = next(each for each in (16, 8, 4, 2) if row_bytes % each == 0)
        covers = piece // size * first.group  # positions that a piece of scales is for
        span = span if covers >= span else CHUNK
        pieces = 1 + -(-(tile.stages - 1) * span // covers)
    scales = pieces * rows * piece * (1 + format.has_biases)
    shared = tile.stages * span * (tile.tokens * 2 + rows * bits // 8) + scales
    outputs = -(-first.outputs // (rows // 2 if gated else rows))
    rounds = max(1, tile.depth // first.inputs)
    made: mx.array = _product(gated, format, share > 0, tile, shared)(
        inputs=[x, order, tiles, *(array for each in weights for array in arrays_of(each))],
        template=[
            ("T", x.dtype),
            ("PIECE", piece),
            ("SPAN", span),
            ("TOKENS", tile.tokens),
            ("STAGES", tile.stages),
            ("SHARE", share),
            ("ARRANGED", arranged),
            ("ROUNDS", rounds),
        ],
        grid=(-(-outputs // rounds) * rows, tiles.shape[0], 1),
        threadgroup=(rows, 1, 1),
        output_shapes=[(order.size, first.outputs)],
        output_dtypes=[x.dtype],
    )[0]
    return made


@cache
def _sort(arranges: bool) -> Any:
    return cuda_kernel(
        name=f"sort_pairs{'_and_arrange' * arranges}",
        input_names=["indices", "x"][: 1 + arranges],
        output_names=["order", "tiles", "arranged"][: 2 + arranges],
        header=include("tensor_core", "prompt_order"),
        source=(ARRANGE if arranges else "")
        + """
            const int pairs = indices_shape[0] * indices_shape[1];
            if (blockIdx.x == 0) headstart::sort_pairs<EXPERTS, TOKENS>(indices, pairs, order, tiles);
        """,
    )


ARRANGE = """
  const int eights = x_shape[0] * (x_shape[1] / 8);
  for (int i = (int(blockIdx.x) - 1) * blockDim.x + threadIdx.x; blockIdx.x && i < eights;
       i += (gridDim.x - 1) * blockDim.x)
    headstart::arrange<BITS>(reinterpret_cast<const uint4*>(x), reinterpret_cast<uint32_t*>(arranged), i);
"""


@cache
def _product(gated: bool, format: Format, gathers: bool, tile: PromptTile, shared: int) -> Any:
    names = [format.names(i) for i in range(1 + gated)]
    both: list[dict[str, str]] = [*names, {}][:2]  # the second is `up`, if there is one

    def begin(letter: str, each: dict[str, str], step: str) -> str:
        return f"{each[letter]} + {step}" if letter in each else "nullptr"

    codes = [
        f"reinterpret_cast<const unsigned char*>({each['w']}) + at * (K / 8 * F::BITS)" if each else "nullptr"
        for each in both
    ]
    scales = [begin(letter, each, "at * (K / F::GROUP)") for each in both for letter in "sb"]
    whole = [f"{each['g']}[expert_of] / headstart::WHOLE_MOST" if "g" in each else "1.0f" for each in both]
    expert = [*codes, *scales, "N", "K", *whole]
    return cuda_kernel(
        name=f"prompt_experts_{'gated_' * gated}{'gathered' if gathers else 'sorted'}_{tile.warps}_{tile.blocks}"
        + "_warpgroups" * tile.warpgroups
        + name_suffix(shared),
        input_names=["x", "order", "tiles", *(name for each in names for name in each.values())],
        output_names=["out"],
        header=include("tensor_core", "warpgroup", "codes", "dequantise", "prompt_experts")
        + launch_bounds(32 * tile.warps, tile.blocks),
        source=f"""
            extern __shared__ __align__(1024) unsigned char dynamic_shared[];
            const int begin = tiles[3 * blockIdx.y + 1], count = tiles[3 * blockIdx.y + 2];
            if (count == 0) return;
            using F = {format.text()};
            const int N = w0_shape[1], K = x_shape[1], expert_of = tiles[3 * blockIdx.y];
            const long long at = (long long)expert_of * N;
            const headstart::Expert<F::Scale> expert = {{{", ".join(expert)}}};
            using Shape = headstart::PromptShape<
                T, F, PIECE, SPAN, {tile.warps}, TOKENS, STAGES, {str(gated).lower()}, ARRANGED,
                {str(tile.warpgroups).lower()}>;
            auto pair = [&](int row) {{ return order[begin + row]; }};
            auto sorted = [&](int row) {{ return begin + row; }};
            auto source = [&](int row) {{ return {"pair(row) / SHARE" if gathers else "sorted(row)"}; }};
            auto target = [&](int row) {{ return {"sorted(row)" if gathers else "pair(row)"}; }};
            headstart::prompt_tile_of<Shape, TOKENS / 8>(
                count, dynamic_shared, x, expert, out, int(blockIdx.x) * ROUNDS * Shape::STRIDE, ROUNDS, count,
                source, target);
        """,
        shared_memory=shared,
    )
