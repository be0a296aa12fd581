"""From parameters in files to tensors of a converted file, a slice of rows at a time."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import mlx.core as mx

from ..errors import CheckpointError
from .parameters import Stored
from .recipe import Packing
from .rows import SLICE, Reader, slices
from .write import Output, SafetensorsFile

Progress = Callable[[int], None]  # bytes read since the last call
STREAMS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Step:
    """One parameter, and what becomes of it."""

    name: str  # in the converted file
    part: Stored
    dtype: mx.Dtype
    packing: Packing | None = None
    scales: Stored | None = None  # of float8 codes
    shift: bool = False  # stored as w of 1 + w
    channels_last: bool = False  # a convolution of images: [O, I, …] → [O, …, I]

    @property
    def outputs(self) -> list[Output]:
        shape = self.part.shape
        if self.channels_last:
            shape = (shape[0], *shape[2:], shape[1])
        if self.packing is None:
            return [Output(self.name, self.dtype, shape)]
        *rows, columns = shape
        module = self.name.removesuffix("weight")
        groups = (*rows, columns // self.packing["group_size"])
        return [
            Output(f"{module}weight", mx.uint32, (*rows, columns * self.packing["bits"] // 32)),
            Output(f"{module}scales", self.dtype, groups),
            Output(f"{module}biases", self.dtype, groups),
        ]

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)

    @property
    def read_bytes(self) -> int:
        """Of the rows that are taken; a fused tensor is read once for each half."""
        return prod(self.part.shape) * self.part.sources[0].dtype.size

    def arrays(self, reader: Reader) -> Iterator[tuple[list[mx.array], int]]:
        """For each slice: the next values of every output, and the bytes that were read for them."""
        limit = self.part.nbytes if self.channels_last else SLICE
        for taken in slices(self.part, self.scales, limit):
            rows = reader.read(taken, self.dtype)
            read = sum(run.count * run.row_bytes for run in taken)
            if self.channels_last:
                rows = rows.reshape(self.part.shape).moveaxis(1, -1)
            if self.shift:
                rows = rows.astype(mx.float32) + 1.0
            if mx.issubdtype(rows.dtype, mx.floating):
                rows = self._cast(rows)
            yield self._packed(rows) if self.packing else [rows], read

    def _cast(self, rows: mx.array) -> mx.array:
        cast = rows.astype(self.dtype)
        if self.dtype == mx.float16 and not bool(mx.isfinite(cast).all()) and bool(mx.isfinite(rows).all()):
            raise CheckpointError(f"{self.name} has values that float16 cannot hold. Take --dtype bfloat16.")
        return cast

    def _packed(self, rows: mx.array) -> list[mx.array]:
        """Codes, scales, biases. A stream is a thread, and on CPU one thread packs 0.1 GB a second."""
        assert self.packing is not None
        parts = []
        size = -(-rows.shape[0] // STREAMS)
        for stream, start in zip(_streams(), range(0, rows.shape[0], size), strict=False):
            parts.append(mx.quantize(rows[start : start + size], **self.packing, stream=stream))
        mx.eval(parts)
        return [mx.concatenate(list(pieces)) for pieces in zip(*parts, strict=True)]


def write_file(path: Path, steps: list[Step], reader: Reader, progress: Progress) -> None:
    outputs = [output for step in steps for output in step.outputs]
    with mx.stream(mx.cpu), SafetensorsFile(path, outputs) as file:
        for step in steps:
            for arrays, read in step.arrays(reader):
                for output, values in zip(step.outputs, arrays, strict=True):
                    file.append(output.name, values)
                del arrays, values
                mx.clear_cache()
                progress(read)


@lru_cache
def _streams() -> list[mx.Stream]:
    return [mx.new_stream(mx.cpu) for _ in range(STREAMS)]
