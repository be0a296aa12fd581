"""Tables of n-gram embeddings in a checkpoint: tens of gigabytes, of which a token needs a few rows.

They are never loaded. The files are mapped into memory, a row is copied when a token needs it, and the pages that
were touched are let go now and then. The rows of a pass are asked of the disk together before the first is copied.
"""

import json
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from ..models.grams import GramShape, GramTable
from .names import without_prefix
from .safetensors import DTYPE_CODES, Header, Progress, TensorInfo

TABLE = re.compile(r"^layers\.(\d+)\.ple\.ple_embedding\.(?:ngram_embedding\.(?:shards?[_.](\d+)\.)?(weight)|(\w+))$")
CONSTANTS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")  # that config.json implies
TYPES = (mx.bfloat16, mx.float16, mx.float32)
TABLES = "ngrams/weights.safetensors"  # where `convert` puts them
PIECE = 2**24  # bytes that are copied at a time
KEPT = 1024  # rows that are copied before the pages they are on are let go


@dataclass(frozen=True)
class StoredTable:
    """A table in the files: its parts, one after the other."""

    shape: GramShape
    layer: int
    parts: tuple[TensorInfo, ...]
    constants: tuple[TensorInfo, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def open(self) -> GramTable:
        """Map the files."""
        self._check_constants()
        return GramTable(self.shape, MappedRows(self.parts))

    def _check_constants(self) -> None:
        """Refuse files whose rows are found in another way than config.json says."""
        shape = self.shape
        expected = dict(zip(CONSTANTS, (shape.multipliers, np.array(shape.head_rows), shape.offsets), strict=True))
        for tensor in self.constants:
            with tensor.file.open("rb") as file:
                file.seek(tensor.start)
                found = np.frombuffer(file.read(tensor.nbytes), np.int64)
            name = tensor.name.rpartition(".")[2]
            if tensor.dtype != mx.int64 or found.tolist() != expected[name].tolist():
                raise CheckpointError(
                    f"{tensor.file}: {tensor.name} is not what config.json makes it. Download the model again: "
                    "config.json and the weights must come from one place."
                )


def find_tables(path: Path, headers: list[Header], shapes: tuple[GramShape, ...]) -> tuple[StoredTable, ...]:
    """Return the tables of a model in these files, or raise an error where they do not have these shapes."""
    parts: dict[int, dict[int, TensorInfo]] = {}
    constants: dict[int, list[TensorInfo]] = {}
    for header in headers:
        for name, tensor in header.tensors.items():
            if match := TABLE.match(without_prefix(name)):
                layer, part, weight, constant = match.groups()
                if weight:
                    parts.setdefault(int(layer), {})[int(part or 0)] = tensor
                elif constant in CONSTANTS:
                    constants.setdefault(int(layer), []).append(tensor)
    if len(parts) != len(shapes):
        raise CheckpointError(
            f"{path}: holds {len(parts)} tables of n-gram embeddings where config.json says {len(shapes)}. Download "
            "the model again: config.json and the weights must come from one place."
        )
    found = []
    for shape, (layer, tensors) in zip(shapes, sorted(parts.items()), strict=True):
        ordered = tuple(tensors[number] for number in sorted(tensors))
        rows, first = sum(tensor.shape[0] for tensor in ordered), ordered[0]
        name = f"{path}: the table of n-gram embeddings of layer {layer}"
        if sorted(tensors) != list(range(len(tensors))) or rows != shape.rows:
            raise CheckpointError(f"{name} has {rows:,} rows where config.json makes it {shape.rows:,}.")
        if first.dtype not in TYPES:
            raise CheckpointError(
                f"{name} is quantised or in float8 ({first.dtype}), which Headstart does not read: take the original "
                "in bfloat16."
            )
        if any(tensor.shape[1:] != (shape.width,) or tensor.dtype != first.dtype for tensor in ordered):
            raise CheckpointError(f"{name} has rows of other sizes or types than config.json says: {first.shape}.")
        found.append(StoredTable(shape, layer, ordered, tuple(constants.get(layer, ()))))
    return tuple(found)


def copy_tables(path: Path, tables: Sequence[StoredTable], progress: Progress) -> None:
    """Write tables into one file, the parts of each as one tensor, a piece at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for table in tables:
        name = f"language_model.model.layers.{table.layer}.ple.ple_embedding.ngram_embedding.weight"
        entry = {"dtype": DTYPE_CODES[table.parts[0].dtype], "shape": [table.shape.rows, table.shape.width]}
        header[name] = {**entry, "data_offsets": [end, end := end + table.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as written:
        written.write(len(text).to_bytes(8, "little") + text)
        for part in (part for table in tables for part in table.parts):
            with part.file.open("rb") as file:
                file.seek(part.start)
                for at in range(0, part.nbytes, PIECE):
                    piece = file.read(min(PIECE, part.nbytes - at))
                    written.write(piece)
                    progress(len(piece))


class MappedRows:
    """Rows of a table that lies in parts of files."""

    def __init__(self, parts: tuple[TensorInfo, ...]):
        self.dtype, self.width = parts[0].dtype, parts[0].shape[1]
        self.row_bytes = self.width * self.dtype.size
        self.starts = np.cumsum([0, *(part.shape[0] for part in parts[:-1])])
        self.maps: dict[Path, mmap.mmap] = {}
        self.copied = 0  # rows since pages were let go
        self.parts = [self._map(part) for part in parts]

    def __call__(self, rows: np.ndarray) -> mx.array:
        """Return rows [...] by their numbers, [..., D]."""
        flat = rows.reshape(-1)
        part = np.searchsorted(self.starts, flat, side="right") - 1
        local = flat - self.starts[part]
        self._ask(part, local)
        made = np.empty((len(flat), self.row_bytes), np.uint8)
        for number in np.unique(part):
            chosen = part == number
            made[chosen] = self.parts[number][1][local[chosen]]
        self._let_go(len(flat))
        return mx.array(made.reshape(-1)).view(self.dtype).reshape(*rows.shape, self.width)

    def _map(self, part: TensorInfo) -> tuple[mmap.mmap, np.ndarray, int]:
        """Return a part's file, its rows as bytes [N, D], and where in the file they begin."""
        if part.file not in self.maps:
            with part.file.open("rb") as file:
                self.maps[part.file] = mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped.madvise(mmap.MADV_RANDOM)
        mapped = self.maps[part.file]
        count = prod(part.shape[:1])
        rows = np.frombuffer(mapped, np.uint8, count * self.row_bytes, part.start).reshape(count, self.row_bytes)
        return mapped, rows, part.start

    def _ask(self, part: np.ndarray, local: np.ndarray) -> None:
        """Ask the disk for all rows at once: one after the other, each would wait for the one before it."""
        for number, row in zip(part.tolist(), local.tolist(), strict=True):
            mapped, _, start = self.parts[number]
            first = start + row * self.row_bytes
            page = first - first % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, page, first + self.row_bytes - page)

    def _let_go(self, rows: int) -> None:
        """Give back the memory of the pages that were touched. The system keeps them while it has room."""
        self.copied += rows
        if self.copied >= KEPT:
            self.copied = 0
            for mapped in self.maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
