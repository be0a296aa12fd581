"""Read the headers and indexes of safetensors files, checked, and write such files an array at a time."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, printable_error
from .config import Malformed, checked_file, checked_name, file_errors, read_object, require_regular

INDEX = "model.safetensors.index.json"
HEADER_REMEDY = "Download it again; if it is a Git LFS pointer, `git lfs pull` replaces it."
INDEX_REMEDY = "Download it again; in a cache, delete it first."
# The types that mx.load reads; it has none for float8, nor for the exponents of its scales, and gives their codes.
DTYPES: dict[str, mx.Dtype] = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "F8_E4M3": mx.uint8,
    "F8_E8M0": mx.uint8,
    "I64": mx.int64, "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
    "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8, "BOOL": mx.bool_,
}  # fmt: skip
Progress = Callable[[int], None]  # called with the bytes written since the last call
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}  # uint8 is U8, the last of its three


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file, or one that is made of `parts` that are."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]
    file: Path
    start: int  # of its bytes in the file
    parts: tuple["TensorInfo", ...] = ()
    make: Callable[..., mx.array] | None = None
    quantized: dict[str, Any] | None = None  # how the parts are, of which numbers are computed

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.size


@dataclass(frozen=True)
class Header:
    path: Path
    tensors: dict[str, TensorInfo]
    format: str | None  # "pt" as released, "mlx" as converted, None where the file does not say
    written_by_mlx: bool  # mlx writes null where other writers leave empty metadata out
    provenance: Literal["raw", "converted"] | None = None  # of what was made from another format


def read_header(path: Path) -> Header:
    """Return what is in the safetensors file `path`, or raise a CheckpointError if it is damaged or truncated."""
    with file_errors(path, HEADER_REMEDY, "not a safetensors file, or truncated: "):
        require_regular(path)
        try:
            with safe_open(path, framework="numpy"):  # which checks the header, and that the data fills the file
                pass
        except SafetensorError as error:
            raise Malformed(printable_error(error)) from error
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
        metadata = header.pop("__metadata__", {})
        tensors = {
            checked_name(name, "a tensor"): _tensor_info(path, start, name, entry) for name, entry in header.items()
        }
    return Header(path, tensors, (metadata or {}).get("format"), metadata is None)


def _tensor_info(path: Path, start: int, name: str, entry: dict[str, Any]) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise Malformed(f"{name}: dtype {entry['dtype']} is unknown; known are {', '.join(DTYPES)}")
    return TensorInfo(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), path, start + entry["data_offsets"][0])


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


def write_safetensors(path: Path, arrays: dict[str, mx.array], progress: Progress) -> None:
    """Compute and write arrays one by one, and drop each from `arrays`, so that one at a time is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, array in arrays.items():
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": DTYPE_CODES[array.dtype], "shape": array.shape, "data_offsets": offsets}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in list(arrays):
            array = arrays.pop(name)
            if array.dtype == mx.float16 and not mx.isfinite(array).all():
                raise CheckpointError(f"{name} has values that float16 cannot hold. Take --dtype bfloat16.")
            append_array(file, array)
            progress(array.nbytes)
            del array
            mx.clear_cache()


def append_array(file: BinaryIO, array: mx.array) -> None:
    data: Any = np.asarray(mx.contiguous(array).reshape(-1).view(mx.uint8))
    file.write(memoryview(data))
