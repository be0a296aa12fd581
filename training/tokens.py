"""Documents as tokens on disk: uint16, packed, in parts small enough to be carried anywhere.

A part holds whole documents: their lengths, then their tokens. A corpus is a folder of parts per kind.
"""

import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PART = 12_000_000  # tokens; about 9 MB packed


@dataclass(frozen=True)
class Documents:
    tokens: NDArray[np.uint16]  # of all documents, one after the other
    lengths: NDArray[np.int64]

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64)


def write(kind: str, documents: Iterable[Sequence[int]], folder: Path) -> int:
    """Parts `kind-00.xz`, `kind-01.xz`, … → the number of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{kind}-*.xz"):
        old.unlink()
    held: list[NDArray[np.uint16]] = []
    size = total = part = 0
    for document in documents:
        held.append(np.asarray(document, dtype=np.uint16))
        size, total = size + len(document), total + len(document)
        if size >= PART:
            _write_part(folder / f"{kind}-{part:02}.xz", held)
            held, size, part = [], 0, part + 1
    if held:
        _write_part(folder / f"{kind}-{part:02}.xz", held)
    return total


def read(kind: str, folder: Path) -> Documents:
    parts = [_read_part(path) for path in sorted(folder.glob(f"{kind}-*.xz"))]
    if not parts:
        raise FileNotFoundError(f"{folder} has no {kind}-*.xz: make them with `python -m training.corpus`")
    return Documents(np.concatenate([p.tokens for p in parts]), np.concatenate([p.lengths for p in parts]))


def _write_part(path: Path, documents: list[NDArray[np.uint16]]) -> None:
    lengths = np.array([len(documents), *map(len, documents)], dtype="<u4")
    body = np.concatenate(documents).astype("<u2")
    path.write_bytes(lzma.compress(lengths.tobytes() + body.tobytes(), preset=4))


def _read_part(path: Path) -> Documents:
    data = lzma.decompress(path.read_bytes())
    count = int(np.frombuffer(data, "<u4", 1)[0])
    lengths = np.frombuffer(data, "<u4", count, offset=4).astype(np.int64)
    return Documents(np.frombuffer(data, "<u2", offset=4 * (count + 1)).astype(np.uint16), lengths)
