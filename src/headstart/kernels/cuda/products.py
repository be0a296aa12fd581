"""Products with weights, for a few rows: a weight is read once, a row's sum has one order for any number of rows.

`products.cu` says how they work. They are for tokens that are decoded or verified: a prompt's chunk is wider.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import mlx.core as mx

from ..weights import MatrixWeights
from .compiler import cuda_kernel
from .device import include
from .formats import Format, arrays_of, format_refusal

MOST_ROWS = 144  # 16 sequences of 9 positions; a prompt's chunks are wider, and mlx's products good at them
SLICES = 4  # of a row of weights, at most
SLICE = 256  # bytes of a slice at least: what a warp does once for every slice of a tile takes as long as that
PARTS = ("tensor_core", "team", "operand", "matrix", "codes", "units", "products")  # files of a product
FULL = 396  # blocks that work at a time: three for each of an H100's multiprocessors


@dataclass(frozen=True)
class SumOrder:
    """How a row is summed: what may depend on the weights' shape and on nothing else."""

    format: Format
    chunk: int  # bytes of a row of weights that are taken at a time
    slices: int  # of a row, each summed for itself

    @classmethod
    def of(cls, weights: MatrixWeights) -> "SumOrder":
        return cls._of(Format.of(weights), weights.inputs)

    @classmethod
    @cache
    def _of(cls, format: Format, inputs: int) -> "SumOrder":
        row = inputs * format.bits // 8
        if format.is_stream:
            codes = next((n for n in (128 if format.bits == 6 else 256, 128) if inputs % n == 0), 64)
            chunk = codes * format.bits // 8
        else:
            least = max(32, format.fills_bytes * format.bits // 8)
            chunk = next((size for size in (128, 64) if row % size == 0), least)
        return cls(format, chunk, min(SLICES, 1 << (max(1, row // SLICE).bit_length() - 1)))

    @property
    def pitch(self) -> int:
        """Return how far rows of a chunk lie apart in shared memory, as in products.cu."""
        turned = self.chunk & (self.chunk - 1) == 0
        return self.chunk if turned or self.chunk // 16 % 2 else self.chunk + 16

    def chunks(self, weights: MatrixWeights) -> int:
        """Return how many chunks a slice has, at least."""
        return weights.inputs * self.format.bits // 8 // self.chunk // self.slices


@dataclass(frozen=True)
class ProductTile:
    """What a block computes at a time: `height` outputs of `columns` rows."""

    height: int
    columns: int

    @classmethod
    def of(cls, rows: int, outputs: int, gated: bool = False) -> "ProductTile":
        """Measured: taller ones do less for each output, but smaller fill the card better. Every one is a kernel of
        its own, which takes its time to compile: so a matrix has two."""
        if gated:
            return cls(32, 8 if rows <= 8 else 16)
        if rows <= 8:
            return cls(32 if outputs >= 32 * FULL else 16, 8)
        return cls(48 if outputs >= 32 * FULL else 16, 16)

    def stages(self, chunks: int) -> int:
        """Chunks under way, where a slice has so many: into the next tile, but no further."""
        return min(3 if self.height == 16 else 2, chunks)


def has_whole_tiles(weights: list[MatrixWeights], tile: ProductTile, gated: bool = False) -> bool:
    """Return whether each matrix is as high as a tile; those of a gate, as half a tile. Rows of scales begin at a
    multiple of 16 bytes where the last tile does."""
    height = tile.height // 2 if gated else tile.height
    return all(
        each.outputs >= height and each.outputs % 8 == 0 and _scales_before(each, each.outputs - height) % 16 == 0
        for each in weights
    )


def _scales_before(weights: MatrixWeights, row: int) -> int:
    """Return the bytes of the scales of so many rows."""
    return 0 if weights.scales is None else row * (weights.inputs // weights.group) * weights.scales.itemsize


def product_refusal(dtype: mx.Dtype, weights: MatrixWeights) -> str | None:
    """Return why mlx's product is taken for activations of this type; None where ours is."""
    if refusal := format_refusal(dtype, weights):
        return refusal
    scales = weights.scales if weights.weight.ndim > 2 else None
    if scales is not None and scales.nbytes // scales.shape[0] % 16:
        return "an expert's scales do not begin at a multiple of 16 bytes"
    each = Format.of(weights).fills_bytes
    return None if weights.inputs % each == 0 else f"{weights.inputs} inputs are no multiple of {each}"


def launch_products(x: mx.array, weights: list[MatrixWeights], gated: bool = False) -> list[mx.array]:
    """Multiply x [..., K] by every weight [N, K], or, `gated`, by a gate and its `up`: `silu(gate) * up` alone is
    returned. They are summed in one order."""
    rows, order = prod(x.shape[:-1]), SumOrder.of(weights[0])
    tile = ProductTile.of(rows, sum(each.outputs for each in weights), gated)
    tiles = sum(-(-each.outputs // tile.height) for each in weights)
    made = weights[:1] if gated else weights
    shared = shared_bytes(weights[0], order, tile, tile.stages(order.chunks(weights[0])), several=tiles > FULL)
    return product_kernel(len(weights), gated, order, shared)(
        inputs=[x, *(array for each in weights for array in arrays_of(each))],
        template=product_template(x.dtype, weights, order, tile, gated),
        grid=(-(-rows // tile.columns) * 32 * order.slices, min(tiles, FULL), 1),
        threadgroup=(32 * order.slices, 1, 1),
        output_shapes=[(*x.shape[:-1], each.outputs) for each in made],
        output_dtypes=[x.dtype] * len(made),
    )


def product_template(
    dtype: mx.Dtype, weights: list[MatrixWeights], order: SumOrder, tile: ProductTile, gated: bool
) -> list[tuple[str, Any]]:
    return [
        ("T", dtype),
        ("CHUNK", order.chunk),
        ("SLICES", order.slices),
        ("HEIGHT", tile.height),
        ("COLUMNS", tile.columns),
        ("STAGES", tile.stages(order.chunks(weights[0]))),
        ("WHOLE", int(has_whole_tiles(weights, tile, gated))),
    ]


ROWS = """
  const int share = 1, rows = x_shape[0] * (x_ndim > 2 ? x_shape[1] : 1) * (x_ndim > 3 ? x_shape[2] : 1);
  auto choose = [&](int tile) { return headstart::tile_of<HEIGHT / 16, WHOLE>(matrices, tile); };
  auto outputs = [&](int, int column) {
    int row = blockIdx.x * COLUMNS + column;
    return row < rows ? row : -1;
  };
"""
RUN = """
  extern __shared__ __align__(512) unsigned char dynamic_shared[];
  int tiles = 0;
  for (const auto& matrix : matrices) tiles += headstart::count_tiles<HEIGHT / 16>(matrix);
  headstart::product<T, F, CHUNK, SLICES, HEIGHT / 16, COLUMNS / 8, STAGES, 1, false, WHOLE, false>(
      headstart::Team::block(blockIdx.y, gridDim.y), dynamic_shared, x, x_shape[x_ndim - 1], tiles, share, choose,
      outputs, [] {});
"""


def matrices(count: int, gated: bool, format: Format, axis: int) -> str:
    """Return the declaration of a launch's matrices. `axis` of a weight is its outputs'."""
    names = [format.names(i) for i in range(count)]
    each = [
        matrix_fields(n, f"w{i}_shape[{axis}]", f"out{i}", names[1] if gated else None)
        for i, n in enumerate(names[: 1 if gated else count])
    ]
    return f"  using F = {format.text()};\n  const headstart::Matrix<T> matrices[] = {{{', '.join(each)}}};\n"


def matrix_fields(
    names: dict[str, str], outputs: str, to: str, up: dict[str, str] | None, residual: str = "nullptr"
) -> str:
    """Return what a `Matrix` holds, by the names of its arrays and its `up`'s."""
    mine, others = ([each.get(letter, "nullptr") for letter in "wsbg"] for each in (names, up or {}))
    return f"{{{', '.join([*mine[:3], outputs, to, *others[:3], residual, mine[3], others[3]])}}}"


@cache
def product_kernel(count: int, gated: bool, order: SumOrder, shared: int) -> Any:
    """Return a kernel for `count` weights. Its template arguments must be those of `order`."""
    return cuda_kernel(
        name=f"product_{'gated' if gated else count}{name_suffix(shared)}",
        input_names=["x", *(name for i in range(count) for name in order.format.names(i).values())],
        output_names=[f"out{i}" for i in range(1 if gated else count)],
        header=include(*PARTS),
        source=matrices(count, gated, order.format, axis=0) + ROWS + RUN,
        shared_memory=shared,
    )


def name_suffix(shared: int) -> str:
    """MLX asks for more than 48000 bytes once a kernel, when it is first run: other sizes need other names."""
    return f"_{shared}" if shared > 48000 else ""


def shared_bytes(weights: MatrixWeights, order: SumOrder, tile: ProductTile, stages: int, several: bool) -> int:
    """Return the shared memory of a team: chunks under way; the slices' sums of this tile and the next; scales and
    biases of this tile and, where a team takes `several`, of those ahead."""
    ring = order.slices * stages * tile.height * order.pitch
    sums = 2 * 4 * order.slices * tile.height * tile.columns
    scales = tile.height * order.format.scale_bytes(weights.inputs)
    return ring + sums + scales * (1 + tiles_ahead(weights, order, stages) if several else 1)


def tiles_ahead(weights: MatrixWeights, order: SumOrder, stages: int) -> int:
    """Return how many tiles ahead of their use a slice's chunks are fetched, at most."""
    return -(-stages // order.chunks(weights))
