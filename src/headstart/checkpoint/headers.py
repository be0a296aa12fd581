"""The header of a safetensors file: eight bytes of length and a JSON object. No weight is read."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError
from .untrusted import MAX_JSON, Malformed, checked_name, parse_object, require_regular

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
        size = require_regular(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_JSON):
                raise Malformed(f"its header would be {length} bytes long, the file has {size}")
            header = parse_object(file.read(length))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict | None) or not all(isinstance(v, str) for v in (metadata or {}).values()):
            raise Malformed("__metadata__ is not a JSON object of strings")
        tensors = {checked_name(name, "a tensor"): _tensor(name, entry, 8 + length) for name, entry in header.items()}
        end = _end(tensors, 8 + length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing. Download the model again.") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    except Malformed as error:
        raise CheckpointError(
            f"{path}: not a safetensors file ({error}). Download it again; if it is a Git LFS pointer, "
            "`git lfs pull` replaces it."
        ) from error
    if size < end:
        raise CheckpointError(f"{path}: truncated, {size} of {end} bytes. Download the file again.")
    return Header(path, tensors, (metadata or {}).get("format"), metadata is None)


def _tensor(name: str, entry: Any, begin: int) -> Tensor:
    """Check one entry of a header whose data begin at byte `begin` of the file."""
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
    dtype, nbytes = DTYPES[code], offsets[1] - offsets[0]
    if prod(shape) * dtype.size != nbytes:
        raise Malformed(f"{name}: shape {shortened(shape)} of {code} would lie in {nbytes} bytes")
    return Tensor(dtype, tuple(shape), nbytes, begin + offsets[0])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _end(tensors: dict[str, Tensor], end: int) -> int:
    """Return the byte after the last tensor, or refuse tensors that share bytes."""
    previous = None
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.nbytes == 0:
            continue
        if tensor.offset < end:
            raise Malformed(f"{name}: data_offsets overlap those of {previous}")
        previous, end = name, tensor.offset + tensor.nbytes
    return end
