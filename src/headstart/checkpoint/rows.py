"""Read a parameter from its files a few rows at a time, so that no tensor is ever whole in memory.

`mx.load` reads a tensor whole however little of it is used: 2.5 GB for the embedding of a 27B model. Here a
parameter is a sequence of rows (all axes but the last, flattened), and what is computed from a row depends on no
other one: shifting, casting and quantising it in slices gives the bits of doing it at once.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .load import FP8_BLOCK, from_fp8
from .parameters import Source, Stored

SLICE = 64 << 20  # bytes read at a time


@dataclass(frozen=True)
class Run:
    """Rows of one tensor that follow one another in the parameter."""

    source: Source
    start: int
    count: int
    scales: Source | None = None  # of float8 codes

    @property
    def row_bytes(self) -> int:
        return columns(self.source) * self.source.dtype.size


def columns(source: Source) -> int:
    """Return the length of a row; a scalar is a row of one."""
    return source.shape[-1] if source.shape else 1


def runs(part: Stored, scales: Stored | None = None) -> Iterator[Run]:
    """The rows of a parameter in its own order: those of each expert, and of a fused tensor the one half."""
    for i, source in enumerate(part.sources):
        rows = prod(source.shape[:-1]) if prod(source.shape) else 0
        if source.half is None:
            yield Run(source, 0, rows, scales.sources[i] if scales else None)
        else:  # [E, 2I, H]
            block = source.shape[-2]
            for start in range(0, rows, block):
                yield Run(source, start + source.half * block // 2, block // 2)


def slices(part: Stored, scales: Stored | None = None, limit: int = SLICE) -> Iterator[list[Run]]:
    """The runs of a parameter, cut and gathered into slices of about `limit` bytes."""
    gathered: list[Run] = []
    room = limit
    for run in runs(part, scales):
        start, end = run.start, run.start + run.count
        while start < end:
            fits = max(1, room // run.row_bytes)
            if run.scales is not None:
                fits = max(1, fits // FP8_BLOCK) * FP8_BLOCK
            count = min(fits, end - start)
            gathered.append(Run(run.source, start, count, run.scales))
            start, room = start + count, room - count * run.row_bytes
            if room < run.row_bytes:
                yield gathered
                gathered, room = [], limit
    if gathered:
        yield gathered


class Reader:
    """The files of a checkpoint, opened once each."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            os.close(file)

    def read(self, taken: list[Run], dtype: mx.Dtype) -> mx.array:
        """[rows, columns], in the files' type; float8 codes times their scales in `dtype`."""
        parts = []
        for run in taken:
            rows = self._rows(run.source, run.start, run.count)
            if run.scales is not None:
                blocks = -(-run.count // FP8_BLOCK)
                rows = from_fp8(rows, self._rows(run.scales, run.start // FP8_BLOCK, blocks)).astype(dtype)
            parts.append(rows)
        return mx.concatenate(parts) if len(parts) > 1 else parts[0]

    def whole(self, part: Stored) -> mx.array:
        """A small parameter, flat."""
        return mx.concatenate([self.read([run], part.dtype).reshape(-1) for run in runs(part)])

    def _rows(self, source: Source, start: int, count: int) -> mx.array:
        row_bytes = columns(source) * source.dtype.size
        data = self._bytes(source.file, source.offset + start * row_bytes, count * row_bytes)
        return mx.array(np.frombuffer(data, np.uint8)).view(source.dtype).reshape(count, columns(source))

    def _bytes(self, path: Path, offset: int, count: int) -> bytes:
        try:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY)
            data = b""
            while len(data) < count:
                read = os.pread(self._files[path], count - len(data), offset + len(data))
                if not read:
                    raise CheckpointError(f"{path}: truncated while it was read. Download the file again.")
                data = data + read if data else read
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
        return data
