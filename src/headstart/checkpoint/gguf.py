"""Read the header of a GGUF file: its metadata, and where its tensors are.

transformers' reader needs torch, gguf's takes seconds for a large vocabulary, and neither notices a file that ends
early. Here every number is checked before it is used, and no tensor is read.
"""

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .blocks import TYPES, Blocks
from .config import Malformed, checked_name, file_errors, require_regular

VERSIONS = (2, 3)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_STRING = 16_000_000  # bytes; chat templates are the longest
MAX_AXES = 4
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
REMEDY = "Download it again."


@dataclass(frozen=True)
class GGUFTensor:
    name: str
    blocks: Blocks  # how its numbers are stored
    shape: tuple[int, ...]  # rows first, as elsewhere
    file: Path
    start: int  # of its bytes in the file


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the architecture's own metadata."""
        return self.metadata.get(f"{self.architecture}.{name}", default)


def read_gguf(path: Path) -> GGUFFile:
    """Return what is in a GGUF file, or in all parts of one that was split, or raise a CheckpointError."""
    first = _read_part(path)
    count = first.metadata.get("split.count", 0)
    if type(count) is not int or count < 2:
        return first
    match = PART.fullmatch(path.name)
    if match is None or int(match[2]) != 1 or int(match[3]) != count:
        raise CheckpointError(f"{path}: a part of a file that was split. Name the first, …-00001-of-{count:05}.gguf.")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        tensors |= _read_part(path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")).tensors
    if len(tensors) != first.metadata.get("split.tensors.count", len(tensors)):
        raise CheckpointError(f"{path}: its parts do not have the tensors that it names. {REMEDY}")
    return GGUFFile(path, first.metadata, tensors)


def _read_part(path: Path) -> GGUFFile:
    with file_errors(path, REMEDY, "not a GGUF file, or truncated: "):
        require_regular(path)
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise Malformed("it is too short")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                try:
                    return _Reader(path, content).read()
                except (struct.error, UnicodeDecodeError, OverflowError) as error:
                    raise Malformed(f"its header is damaged ({error})") from error


class _Reader:
    def __init__(self, path: Path, content: mmap.mmap):
        self.path, self.content, self.at = path, content, 0

    def read(self) -> GGUFFile:
        if self.content[:4] != b"GGUF":
            raise Malformed("it does not begin with GGUF")
        self.at = 4
        (version,) = self.unpack("I")
        if version not in VERSIONS:
            kind = "for big-endian machines" if version & 0xFFFF == 0 else f"version {version}"
            raise Malformed(f"{kind}, where versions 2 and 3 are read")
        tensors, fields = self.unpack("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(self.checked_count(fields, 13)):
            name = checked_name(self.string(), "a field")
            if name in metadata:
                raise Malformed(f"{name} comes twice")
            metadata[name] = self.value(*self.unpack("I"))
        infos = [self.tensor() for _ in range(self.checked_count(tensors, 24))]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise Malformed(f"general.alignment is {alignment!r}, not a power of two")
        start = -(-self.at // alignment) * alignment
        found: dict[str, GGUFTensor] = {}
        for name, shape, stored, offset in infos:
            tensor = GGUFTensor(name, _blocks(name, shape, stored), shape, self.path, start + offset)
            if name in found:
                raise Malformed(f"{name} comes twice")
            if tensor.start + tensor.blocks.row_bytes(shape[-1]) * prod(shape[:-1]) > len(self.content):
                raise Malformed(f"{name} ends after the file")
            found[name] = tensor
        return GGUFFile(self.path, metadata, found)

    def unpack(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.content, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return values

    def checked_count(self, count: int, least: int) -> int:
        """Return the number of things that take at least so many bytes each, if the file can hold them."""
        if count * least > len(self.content) - self.at:
            raise Malformed(f"{count} entries in the last {len(self.content) - self.at} bytes")
        return count

    def string(self) -> str:
        (length,) = self.unpack("Q")
        if length > MAX_STRING:
            raise Malformed(f"a string of {length} bytes")
        self.checked_count(length, 1)
        self.at += length
        return self.content[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in NUMBERS:
            return self.unpack(NUMBERS[kind])[0]
        if kind != ARRAY:
            raise Malformed(f"a value of type {kind}, which GGUF does not have")
        kind, count = self.unpack("IQ")
        if kind == STRING:
            return [self.string() for _ in range(self.checked_count(count, 8))]
        if kind not in NUMBERS:
            raise Malformed(f"an array of type {kind}")
        return list(self.unpack(f"{self.checked_count(count, 1)}{NUMBERS[kind]}"))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = checked_name(self.string(), "a tensor")
        (axes,) = self.unpack("I")
        if not 1 <= axes <= MAX_AXES:
            raise Malformed(f"{name} has {axes} axes")
        shape = self.unpack(f"{axes}Q")[::-1]
        if not all(0 < size < 2**31 for size in shape):
            raise Malformed(f"{name} has shape {list(shape)}")
        kind, offset = self.unpack("IQ")
        return name, shape, kind, offset


def _blocks(name: str, shape: tuple[int, ...], kind: int) -> Blocks:
    if kind not in TYPES:
        known = ", ".join(blocks.name for blocks in TYPES.values())
        raise Malformed(f"{name} is of GGUF's type {UNREAD.get(kind, kind)}; Headstart reads {known}")
    if shape[-1] % TYPES[kind].size:
        raise Malformed(f"{name} has rows of {shape[-1]} numbers, which are no blocks of {TYPES[kind].size}")
    return TYPES[kind]


UNREAD = {
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
}  # fmt: skip
