"""Read and write safetensors files: headers, indexes and rows of tensors, so that no tensor is whole in memory."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .config import (
    MAX_JSON,
    Malformed,
    checked_file,
    checked_name,
    file_errors,
    parse_object,
    read_object,
    require_regular,
)

INDEX = "model.safetensors.index.json"
HEADER_REMEDY = "Download it again; if it is a Git LFS pointer, `git lfs pull` replaces it."
INDEX_REMEDY = "Download it again; in a cache, delete it first."
# The types that mx.load returns; it has none for float8 and gives its codes.
DTYPES: dict[str, mx.Dtype] = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "F8_E4M3": mx.uint8,
    "I64": mx.int64, "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
    "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8, "BOOL": mx.bool_,
}  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}  # uint8 is U8, the last of its two


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file, or one that will be written and has no place yet."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]
    file: Path = Path()
    offset: int = 0  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.size

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row: all axes but the last are flattened, and a scalar is a row of one."""
        return (self.shape[-1] if self.shape else 1) * self.dtype.size


@dataclass(frozen=True)
class Header:
    path: Path
    tensors: dict[str, TensorInfo]
    format: str | None  # "pt" as released, "mlx" as converted, None where the file does not say
    written_by_mlx: bool  # mlx writes null where other writers leave empty metadata out


def read_header(path: Path) -> Header:
    """Return what is in the safetensors file `path`, or raise a CheckpointError if it is damaged or truncated."""
    with file_errors(path, HEADER_REMEDY, "not a safetensors file: "):
        size = require_regular(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_JSON):
                raise Malformed(f"its header would be {length} bytes long, the file has {size}")
            header = parse_object(file.read(length))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict | None) or not all(isinstance(v, str) for v in (metadata or {}).values()):
            raise Malformed("__metadata__ is not a JSON object of strings")
        tensors = {name: _tensor_info(path, name, entry, 8 + length) for name, entry in header.items()}
        end = _end_of_data(tensors, 8 + length)
    if size < end:
        raise CheckpointError(f"{path}: truncated, {size} of {end} bytes. Download the file again.")
    return Header(path, tensors, (metadata or {}).get("format"), metadata is None)


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Check one entry of a header whose data begins at byte `data_start` of the file."""
    checked_name(name, "a tensor")
    if not isinstance(entry, dict):
        raise Malformed(f"{name} is not described by a JSON object")
    code: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise Malformed(f"{name}: dtype {shortened(code)} is unknown; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape):
        raise Malformed(f"{name}: shape {shortened(shape)} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Malformed(f"{name}: data_offsets {shortened(offsets)} are not where it begins and ends")
    tensor = TensorInfo(name, DTYPES[code], tuple(shape), path, data_start + offsets[0])
    if tensor.nbytes != offsets[1] - offsets[0]:
        raise Malformed(f"{name}: shape {shortened(shape)} of {code} does not take {offsets[1] - offsets[0]} bytes")
    return tensor


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _end_of_data(tensors: dict[str, TensorInfo], end: int) -> int:
    """Return the byte after the last tensor, or refuse tensors that share bytes."""
    previous = None
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.nbytes == 0:
            continue
        if tensor.offset < end:
            raise Malformed(f"{name}: data_offsets overlap those of {previous}")
        previous, end = name, tensor.offset + tensor.nbytes
    return end


def read_index(folder: Path) -> dict[str, Any] | None:
    """Return the index with its names checked: every file is in the folder or below it. None without an index."""
    file = folder / INDEX
    if not file.exists():
        return None
    index = read_object(file, INDEX_REMEDY)
    with file_errors(file, INDEX_REMEDY):
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise Malformed("not an index of tensors: weight_map is not a JSON object")
        metadata = index.get("metadata") or {}
        size: Any = metadata.get("total_size", 0) if isinstance(metadata, dict) else None
        if type(size) not in (int, float) or not 0 <= size < float("inf"):
            raise Malformed("metadata is not a JSON object with a number as its total_size")
        for name, shard in weight_map.items():
            weight_map[name] = checked_file(shard, f"weight_map.{checked_name(name, 'a tensor')}")
    return index


def shard_names(folder: Path, holds: Callable[[str], bool]) -> list[str]:
    """Return the names of the files that hold tensors of a kind, whether or not they are on disk."""
    index = read_index(folder)
    if index is None:
        return ["model.safetensors"]
    return sorted({file for name, file in index["weight_map"].items() if holds(name)})


def shard_files(folder: Path, holds: Callable[[str], bool]) -> list[Path]:
    """Return the files that hold tensors of a kind; without an index, all files."""
    if (folder / INDEX).exists():
        return [folder / name for name in shard_names(folder, holds)]
    return sorted(folder.glob("*.safetensors"))


def read_rows(tensor: TensorInfo, start: int, count: int) -> mx.array:
    """Read `count` rows of a tensor, from row `start` on.

    `mx.load` reads a tensor whole however little of it is used: 2.5 GB for the embedding of a 27B model.
    """
    size = count * tensor.row_bytes
    with file_errors(tensor.file):
        data = np.fromfile(tensor.file, np.uint8, size, offset=tensor.offset + start * tensor.row_bytes)
        if len(data) < size:
            raise Malformed("truncated while it was read")
    return mx.array(data).view(tensor.dtype).reshape(count, tensor.row_bytes // tensor.dtype.size)


@contextmanager
def safetensors_writer(path: Path, tensors: list[TensorInfo]) -> Iterator[Callable[[str, mx.array], None]]:
    """Create a safetensors file and yield `append(name, values)`, which writes the next values of a tensor.

    The header comes first, so all sizes must be known. The tensors may be written in any order, each in parts.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.nbytes]
        header[tensor.name] = {"dtype": DTYPE_CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    position = {tensor.name: 8 + len(text) + header[tensor.name]["data_offsets"][0] for tensor in tensors}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as file:

        def write(offset: int, data: bytes | memoryview) -> None:
            view = memoryview(data)
            while view:
                written = os.pwrite(file.fileno(), view, offset)
                view, offset = view[written:], offset + written

        def append(name: str, values: mx.array) -> None:
            data: Any = np.asarray(mx.contiguous(values).reshape(-1).view(mx.uint8))
            write(position[name], memoryview(data))
            position[name] += values.nbytes

        write(0, len(text).to_bytes(8, "little") + text)
        yield append
