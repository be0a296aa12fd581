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
from .parameters import BITS, FP8_BLOCK, StoredParameter, dequantize_fp8
from .safetensors import TensorInfo, read_rows, safetensors_writer

ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
ROUTER = {"group_size": 64, "bits": 8}
GROUP_SIZES = (32, 64, 128)
SLICE = 64 << 20  # bytes read at a time
STREAMS = min(8, os.cpu_count() or 1)

Quantization = dict[str, Any]  # group_size, bits
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
        bits = ", ".join(map(str, BITS))
        if self.bits not in (None, *BITS):
            raise CheckpointError(f"{self.bits} bits: mlx quantises to {bits} bits.")
        if str(self.mtp_bits) not in ("None", "keep", *map(str, BITS)):
            raise CheckpointError(f"--mtp-bits {self.mtp_bits}: say keep, or one of {bits}.")
        if self.group_size not in GROUP_SIZES:
            raise CheckpointError(
                f"groups of {self.group_size}: mlx quantises in groups of {', '.join(map(str, GROUP_SIZES))}."
            )
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

    def for_trunk(self, lm: nn.Module) -> Callable[[str, nn.Module], Quantization | None]:
        """Return the choice for each module of the trunk, by its path in mlx-lm."""
        if not self.quantises:
            return lambda path, module: None
        if self.mixed is not None:
            choose: Any = mixed_quant_predicate_builder(self.mixed, lm, self.group_size)
            return lambda path, module: _fitting(path, module, choose(path, module))
        return lambda path, module: _fitting(path, module, {"group_size": self.group_size, "bits": self.bits})

    def for_head(self, path: str, module: nn.Module) -> Quantization | None:
        if self.head_bits is None or path == "mtp.fc":
            return None
        return _fitting(path, module, {"group_size": self.group_size, "bits": self.head_bits})


def _fitting(path: str, module: nn.Module, wanted: Quantization) -> Quantization | None:
    """Return None where the module cannot be quantised, as in mlx-lm: groups must fill a row."""
    if not hasattr(module, "to_quantized"):
        return None
    if path.endswith(ROUTERS):
        wanted = ROUTER
    return None if module.weight.shape[-1] % wanted["group_size"] else wanted


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
        for ranges in row_slices(self.stored, self.scales, limit):
            rows = mx.concatenate([self._read(*each) for each in ranges])
            if self.channels_last:
                rows = rows.reshape(self.stored.shape).moveaxis(1, -1)
            if self.shift:
                rows = rows.astype(mx.float32) + 1.0
            if mx.issubdtype(rows.dtype, mx.floating):
                rows = self._cast(rows)
            read = sum(count for _, _, count in ranges) * self.stored.sources[0].tensor.row_bytes
            yield _quantized(rows, self.quantization) if self.quantization else [rows], read

    def _read(self, source: int, start: int, count: int) -> mx.array:
        rows = read_rows(self.stored.sources[source].tensor, start, count)
        if self.scales is None:
            return rows
        scales = read_rows(self.scales.sources[source].tensor, start // FP8_BLOCK, -(-count // FP8_BLOCK))
        return dequantize_fp8(rows, scales).astype(self.dtype)

    def _cast(self, rows: mx.array) -> mx.array:
        cast = rows.astype(self.dtype)
        if self.dtype == mx.float16 and not bool(mx.isfinite(cast).all()) and bool(mx.isfinite(rows).all()):
            raise CheckpointError(f"{self.name} has values that float16 cannot hold. Take --dtype bfloat16.")
        return cast


def row_ranges(stored: StoredParameter) -> Iterator[tuple[int, int, int]]:
    """Yield source, first row and count for the rows of a parameter in its order: each expert's, or the half's."""
    for number, source in enumerate(stored.sources):
        shape = source.tensor.shape
        rows = prod(shape[:-1]) if prod(shape) else 0
        if source.half is None:
            yield number, 0, rows
        else:  # [E, 2I, H]
            block = shape[-2]
            for start in range(0, rows, block):
                yield number, start + source.half * block // 2, block // 2


def row_slices(
    stored: StoredParameter, scales: StoredParameter | None = None, limit: int = SLICE
) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the row ranges of a parameter, cut and gathered into slices of about `limit` bytes."""
    row_bytes = stored.sources[0].tensor.row_bytes
    multiple = FP8_BLOCK if scales else 1  # the rows of a block share their scales
    gathered: list[tuple[int, int, int]] = []
    left = limit
    for source, start, count in row_ranges(stored):
        end = start + count
        while start < end:
            count = min(max(1, left // row_bytes // multiple) * multiple, end - start)
            gathered.append((source, start, count))
            start += count
            left -= count * row_bytes
            if left < row_bytes:
                yield gathered
                gathered, left = [], limit
    if gathered:
        yield gathered


def read_whole(stored: StoredParameter) -> mx.array:
    """Read a small parameter, flat."""
    parts = [read_rows(stored.sources[n].tensor, start, count) for n, start, count in row_ranges(stored)]
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
