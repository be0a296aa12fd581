"""Products with weights, for a few rows: a weight is read once, a row's sum has one order for any number of rows.

mlx's own products change their order with the number of rows, and on CUDA read quantised weights again for every
row, so that verifying costs as much as decoding. `products.cu` says how ours work. They are for tokens that are
decoded or verified; a prompt's chunk, another device or a shape that does not fit takes mlx's, which is the oracle.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cuda import TENSOR_CORE, on_cuda, source

MOST_ROWS = 144  # 16 sequences of 9 positions; a prompt's chunks are wider, and mlx's products good at them
WARPS = 8  # of a block, at most
STAGES = 4  # at most


@dataclass(frozen=True)
class Weights:
    """A matrix [N, K], or one for each expert [E, N, K], as its module holds it."""

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16
    group: int = 1  # weights that share a scale

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[-2])

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[-1]) * self.weight.itemsize * 8 // self.bits

    def arrays(self) -> list[mx.array]:
        return [array for array in (self.weight, self.scales, self.biases) if array is not None]


@dataclass(frozen=True)
class Order:
    """How a row is summed: what may depend on the weights' shape and on nothing else."""

    bits: int
    group: int
    chunk: int  # bytes of a row of weights that a warp takes at a time
    warps: int
    stages: int  # chunks that a warp has under way

    @classmethod
    def of(cls, weights: Weights) -> "Order":
        row = weights.inputs * weights.bits // 8
        chunk = 64 if row % 64 == 0 else 32
        warps = min(WARPS, 1 << ((row // chunk).bit_length() - 1))
        return cls(weights.bits, weights.group, chunk, warps, min(STAGES, -(-row // (chunk * warps))))


@dataclass(frozen=True)
class Tile:
    """What a block computes: 16 · `tall` outputs of 8 · `wide` rows."""

    tall: int
    wide: int

    @classmethod
    def of(cls, rows: int, outputs: int) -> "Tile":
        if rows > 8:
            return cls(1, 2)
        return cls(2, 1) if outputs > 2**16 else cls(1, 1)  # taller ones do less, but smaller fill the card better


def product(x: mx.array, layer: nn.Module) -> mx.array:
    """`layer(x)`, where `layer` is linear: [..., K] → [..., N]."""
    return products(x, layer)[0]


def products(x: mx.array, *layers: nn.Module) -> list[mx.array]:
    """`layer(x)` for every layer, in one launch where they are of one kind."""
    found = [weights_of(layer) for layer in layers]
    if not on_cuda() or prod(x.shape[:-1]) > MOST_ROWS or any(refusal(x.dtype, w) for w in found):
        return [layer(x) for layer in layers]
    orders = [Order.of(weights) for weights in found]
    if len(set(orders)) > 1:
        return [launch(x, [weights])[0] for weights in found]
    return launch(x, found)


def tied(x: mx.array, embedding: nn.Module) -> mx.array:
    """`embedding.as_linear(x)`."""
    weights = weights_of(embedding)
    if not on_cuda() or prod(x.shape[:-1]) > MOST_ROWS or refusal(x.dtype, weights):
        return embedding.as_linear(x)
    return launch(x, [weights])[0]


def weights_of(layer: nn.Module) -> Weights:
    if "scales" not in layer:
        return Weights(layer.weight)
    return Weights(layer.weight, layer.scales, layer.get("biases"), layer.bits, layer.group_size)


def refusal(dtype: mx.Dtype, weights: Weights) -> str | None:
    """Why mlx's product is taken for activations of this type; None where ours is."""
    if dtype not in (mx.bfloat16, mx.float16):
        return f"activations are {str(dtype).removeprefix('mlx.core.')}"
    if weights.scales is None:
        if weights.weight.dtype != dtype:
            return f"weights are {str(weights.weight.dtype).removeprefix('mlx.core.')}"
        return None if weights.inputs % 32 == 0 else f"{weights.inputs} inputs are no multiple of 32"
    if weights.biases is None or weights.scales.dtype != dtype:
        return "quantised in another way than affine"
    if weights.bits not in (4, 8) or weights.group not in (32, 64, 128):
        return f"{weights.bits} bits in groups of {weights.group}"
    each = max(256 // weights.bits, weights.group)  # a chunk is half a line of memory, or holds whole groups
    return None if weights.inputs % each == 0 else f"{weights.inputs} inputs are no multiple of {each}"


def launch(x: mx.array, weights: list[Weights]) -> list[mx.array]:
    """x [..., K] by every weight [N, K]. They are of one order."""
    rows, order = prod(x.shape[:-1]), Order.of(weights[0])
    tile = Tile.of(rows, weights[0].outputs)
    blocks = sum(-(-each.outputs // (16 * tile.tall)) for each in weights)
    return kernel(len(weights), order, tile, shared_bytes(weights[0], order, tile))(
        inputs=[x, *(array for each in weights for array in each.arrays())],
        template=template(x.dtype, order, tile),
        grid=(-(-rows // (8 * tile.wide)) * 32 * order.warps, blocks, 1),
        threadgroup=(32 * order.warps, 1, 1),
        output_shapes=[(*x.shape[:-1], each.outputs) for each in weights],
        output_dtypes=[x.dtype] * len(weights),
    )


def template(dtype: mx.Dtype, order: Order, tile: Tile) -> list[tuple[str, Any]]:
    return [
        ("T", dtype),
        ("BITS", order.bits),
        ("GROUP", order.group),
        ("CHUNK", order.chunk),
        ("TALL", tile.tall),
        ("WIDE", tile.wide),
        ("WARPS", order.warps),
        ("STAGES", order.stages),
    ]


# Which of the weights a block works for: `blockIdx.y` counts through all of them.
CHOOSE = """
  int block = blockIdx.y, N = w0_shape[{axis}];
  const void* w = w0;
  const T *scales = {s}, *biases = {b};
  T* y = out0;
"""
NEXT = """
  if (block >= (N + 16 * TALL - 1) / (16 * TALL)) {{
    block -= (N + 16 * TALL - 1) / (16 * TALL);
    N = w{i}_shape[{axis}], w = w{i}, scales = {s}, biases = {b}, y = out{i};
"""
START = """
  const int K = x_shape[x_ndim - 1];
"""
COLUMNS = """
  const int rows = x_shape[0] * (x_ndim > 2 ? x_shape[1] : 1) * (x_ndim > 3 ? x_shape[2] : 1);
  constexpr int share = 1;
  auto outputs = [&](int column) {
    int row = blockIdx.x * 8 * WIDE + column;
    return row < rows ? row : -1;
  };
"""
RUN = """
  headstart::product<T, BITS, GROUP, CHUNK, TALL, WIDE, WARPS, STAGES>(
      x, w, scales, biases, y, N, K, 16 * TALL * block, share, outputs);
"""


def body(columns: str, count: int, quantised: bool, axis: int) -> str:
    """The kernel's text for `count` weights, whose outputs are their `axis`."""

    def named(letter: str, i: int) -> str:
        return f"{letter}{i}" if quantised else "nullptr"

    text = START + columns + CHOOSE.format(axis=axis, s=named("s", 0), b=named("b", 0))
    for i in range(1, count):
        text += NEXT.format(i=i, axis=axis, s=named("s", i), b=named("b", i))
    return text + "  }\n" * (count - 1)


@cache
def kernel(count: int, order: Order, tile: Tile, shared: int) -> Any:
    """One launch over `count` weights. Its template arguments must be those of `order` and `tile`."""
    quantised = order.bits < 16
    return mx.fast.cuda_kernel(
        name=f"product_{count}{large(shared)}",
        input_names=["x", *names(count, quantised)],
        output_names=[f"out{i}" for i in range(count)],
        header=TENSOR_CORE + source("products"),
        source=body(COLUMNS, count, quantised, axis=0) + RUN,
        shared_memory=shared,
    )


def large(shared: int) -> str:
    """MLX asks for more than 48000 bytes once a kernel, when it is first run: other sizes need other names."""
    return f"_{shared}" if shared > 48000 else ""


def names(count: int, quantised: bool) -> list[str]:
    return [f"{letter}{i}" for i in range(count) for letter in ("wsb" if quantised else "w")]


def shared_bytes(weights: Weights, order: Order, tile: Tile) -> int:
    """The rings of a block's warps and its scales and biases; then the warps' sums take their place."""
    ring = order.warps * order.stages * tile.tall * 16 * order.chunk
    scales = 0 if weights.scales is None else 2 * 2 * 16 * tile.tall * weights.inputs // weights.group
    return max(ring + scales, 512 * order.warps * tile.tall * tile.wide)
