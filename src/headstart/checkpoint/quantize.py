"""Turn parameters in files into tensors of a converted file: what is quantised and how, a slice of rows at a time.

What is computed from a row depends on no other row: shifting, casting and quantising slices of rows gives the bytes
of doing it at once, and no tensor is ever whole in memory.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.convert import QUANT_RECIPES, mixed_quant_predicate_builder

from ..errors import CheckpointError
from .parameters import BITS, FP8_BLOCK, GROUP_SIZES, StoredParameter, dequantize_fp8
from .safetensors import TensorInfo, read_rows, safetensors_writer

ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
ROUTER = {"group_size": 64, "bits": 8}
SLICE = 64 << 20  # bytes read at a time
STREAMS = min(8, os.cpu_count() or 1)

Quantization = dict[str, Any]  # group_size, bits
Choose = Callable[[str, nn.Module], Quantization | None]  # by the path of a module and the module
Progress = Callable[[int], None]  # called with the bytes read since the last call


@dataclass(frozen=True)
class Recipe:
    """How `convert` and `graft` quantise.

    Args:
        bits: Of the trunk. None: not quantised.
        mixed: One of mlx-lm's mixed-precision recipes, instead of `bits`.
        mtp_bits: Of the head: "keep", or a number. None: 8 where the trunk is quantised, else not quantised. `mtp.fc`
            and norms are never quantised.
    """

    dtype: mx.Dtype
    bits: int | None = None
    group_size: int = 64
    mixed: str | None = None
    mtp_bits: str | int | None = None

    def __post_init__(self) -> None:
        bits, sizes = (", ".join(map(str, known)) for known in (BITS, GROUP_SIZES))
        if self.bits not in (None, *BITS):
            raise CheckpointError(f"{self.bits} bits: mlx quantises to {bits} bits.")
        if str(self.mtp_bits) not in ("None", "keep", *map(str, BITS)):
            raise CheckpointError(f"--mtp-bits {self.mtp_bits}: say keep, or one of {bits}.")
        if self.group_size not in GROUP_SIZES:
            raise CheckpointError(f"groups of {self.group_size}: mlx quantises in groups of {sizes}.")
        if self.mixed not in (None, *QUANT_RECIPES):
            raise CheckpointError(f"{self.mixed}: mlx-lm has the recipes {', '.join(QUANT_RECIPES)}.")
        if self.mixed is not None and self.bits is not None:
            raise CheckpointError(f"{self.mixed} says how many bits each layer has: leave --bits out.")

    @property
    def quantises(self) -> bool:
        return self.bits is not None or self.mixed is not None

    @property
    def head_bits(self) -> int | None:
        """Return the bits of the head; None: not quantised."""
        if self.mtp_bits is None:
            return 8 if self.quantises else None
        return None if self.mtp_bits == "keep" else int(self.mtp_bits)

    def for_trunk(self, lm: nn.Module) -> Choose:
        if self.mixed is not None:
            choose: Any = mixed_quant_predicate_builder(self.mixed, lm, self.group_size)
            return choose
        return lambda path, module: {"group_size": self.group_size, "bits": self.bits} if self.bits else None

    def for_head(self, path: str, module: nn.Module) -> Quantization | None:
        if self.head_bits is None or path == "mtp.fc":
            return None
        return {"group_size": self.group_size, "bits": self.head_bits}


def choose_quantization(path: str, module: nn.Module, choose: Choose) -> Quantization | None:
    """Return what `choose` says of a module, 8 bits for a router, None where mlx-lm could not quantise it either."""
    found = choose(path, module) if hasattr(module, "to_quantized") else None
    if found and path.endswith(ROUTERS):
        found = ROUTER
    return found if found and module.weight.shape[-1] % found["group_size"] == 0 else None


@dataclass(frozen=True)
class TensorPlan:
    """One parameter, and what will be written for it."""

    name: str  # in the converted file
    stored: StoredParameter
    dtype: mx.Dtype
    quantization: Quantization | None = None
    scales: StoredParameter | None = None  # of float8 codes
    shift: bool = False  # a norm stored as w, to be written as 1 + w
    channels_last: bool = False  # a convolution of images: [O, I, …] → [O, …, I]

    @property
    def outputs(self) -> list[TensorInfo]:
        shape = self.stored.shape
        if self.channels_last:
            shape = (shape[0], *shape[2:], shape[1])
        if self.quantization is None:
            return [TensorInfo(self.name, self.dtype, shape)]
        *rows, columns = shape
        module = self.name.removesuffix("weight")
        groups = (*rows, columns // self.quantization["group_size"])
        return [
            TensorInfo(f"{module}weight", mx.uint32, (*rows, columns * self.quantization["bits"] // 32)),
            TensorInfo(f"{module}scales", self.dtype, groups),
            TensorInfo(f"{module}biases", self.dtype, groups),
        ]

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)

    def arrays(self) -> Iterator[tuple[list[mx.array], int]]:
        """Yield, for each slice, the next values of every output and the bytes that were read for them."""
        limit = self.stored.nbytes if self.channels_last else SLICE
        for source, start, count in row_ranges(self.stored, limit, FP8_BLOCK if self.scales else 1):
            tensor = self.stored.sources[source].tensor
            rows = read_rows(tensor, start, count)
            if self.scales:
                blocks = read_rows(self.scales.sources[source].tensor, start // FP8_BLOCK, -(-count // FP8_BLOCK))
                rows = dequantize_fp8(rows, blocks).astype(self.dtype)
            if self.channels_last:
                rows = rows.reshape(self.stored.shape).moveaxis(1, -1)
            if self.shift:
                rows = rows.astype(mx.float32) + 1.0
            values = rows.astype(self.dtype) if mx.issubdtype(rows.dtype, mx.floating) else rows
            if self.dtype == mx.float16 and mx.isfinite(rows).all() and not mx.isfinite(values).all():
                raise CheckpointError(f"{self.name} has values that float16 cannot hold. Take --dtype bfloat16.")
            yield _quantized(values, self.quantization) if self.quantization else [values], count * tensor.row_bytes


def row_ranges(stored: StoredParameter, limit: int, multiple: int = 1) -> Iterator[tuple[int, int, int]]:
    """Yield the rows of a parameter in its order, as number of the source, first row and count.

    A range has about `limit` bytes, and a `multiple` of rows unless it is the last of its source.
    """
    for number, source in enumerate(stored.sources):
        shape = source.tensor.shape
        rows = prod(shape[:-1]) if prod(shape) else 0
        starts, length = range(1), rows
        if source.half is not None:  # [E, 2I, H]: of each expert the first or the second I rows
            length = shape[-2] // 2
            starts = range(source.half * length, rows, shape[-2])
        step = max(1, limit // source.tensor.row_bytes // multiple) * multiple if rows else 1
        for start in starts:
            for first in range(start, start + length, step):
                yield number, first, min(step, start + length - first)


def read_whole(stored: StoredParameter) -> mx.array:
    """Read a small parameter, flat."""
    parts = [read_rows(stored.sources[n].tensor, start, count) for n, start, count in row_ranges(stored, SLICE)]
    return mx.concatenate(parts).reshape(-1)


def _quantized(rows: mx.array, quantization: Quantization) -> list[mx.array]:
    """Return codes, scales and biases. A stream is a thread, and on CPU one thread quantises 0.1 GB a second."""
    parts = []
    size = -(-rows.shape[0] // STREAMS)
    for stream, start in zip(_streams(), range(0, rows.shape[0], size), strict=False):
        parts.append(mx.quantize(rows[start : start + size], **quantization, stream=stream))
    mx.eval(parts)
    return [mx.concatenate(list(pieces)) for pieces in zip(*parts, strict=True)]


@lru_cache
def _streams() -> list[mx.Stream]:
    return [mx.new_stream(mx.cpu) for _ in range(STREAMS)]


def write_file(path: Path, plans: list[TensorPlan], progress: Progress) -> None:
    """Write the outputs of `plans` to a safetensors file."""
    outputs = [output for plan in plans for output in plan.outputs]
    with mx.stream(mx.cpu), safetensors_writer(path, outputs) as append:
        for plan in plans:
            for arrays, read in plan.arrays():
                for output, values in zip(plan.outputs, arrays, strict=True):
                    append(output.name, values)
                del arrays, values
                mx.clear_cache()
                progress(read)
