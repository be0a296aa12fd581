"""The header of a safetensors file: eight bytes of length and a JSON object. No weight is read."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError

# The types that mx.load returns; it has none for float8 and gives its codes.
DTYPES: dict[str, mx.Dtype] = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F8_E4M3": mx.uint8,
    "I64": mx.int64,
    "I32": mx.int32,
    "I16": mx.int16,
    "I8": mx.int8,
    "U64": mx.uint64,
    "U32": mx.uint32,
    "U16": mx.uint16,
    "U8": mx.uint8,
    "BOOL": mx.bool_,
}


@dataclass(frozen=True)
class Tensor:
    dtype: mx.Dtype
    shape: tuple[int, ...]
    nbytes: int
    offset: int  # of its first byte in the file


@dataclass(frozen=True)
class Header:
    path: Path
    tensors: dict[str, Tensor]
    format: str | None  # "pt" as released, "mlx" as converted, None where the file does not say
    written_by_mlx: bool  # mlx writes null where other writers leave an empty metadata out


def read_header(path: Path) -> Header:
    """Check that `path` is a whole safetensors file and say what is in it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"its header would be {length} bytes long, the file has {size}")
            header: dict[str, Any] = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        tensors, ends = {}, [0]
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            if prod(shape) * dtype.size != end - start:
                raise ValueError(f"{name} of shape {shape} would lie in {end - start} bytes")
            tensors[name] = Tensor(dtype, shape, end - start, 8 + length + start)
            ends.append(end)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing. Download the model again.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a safetensors file ({error}). Download it again; if it is a Git LFS pointer, "
            "`git lfs pull` replaces it."
        ) from error
    if size < 8 + length + max(ends):
        raise CheckpointError(
            f"{path}: truncated, {size} of {8 + length + max(ends)} bytes. Download the file again."
        )
    return Header(path, tensors, (metadata or {}).get("format"), metadata is None)
