"""Write files so that a crash, a full disk or Ctrl-C leaves either the whole result or none of it.

All is written and synced to a temporary folder on the same disk, and moved to its place at the end. What a killed
process left is removed by the next one that writes to the same place: it locks its folder, and the lock dies with it.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError
from .headers import DTYPES

CODES = {dtype: code for code, dtype in reversed(DTYPES.items())}  # uint8 is U8, not F8_E4M3
MARK = ".headstart-"


@dataclass(frozen=True)
class Output:
    """A tensor that will be written."""

    name: str
    dtype: mx.Dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.size


class SafetensorsFile:
    """A safetensors file whose sizes are known before its values: the header first, then each tensor in parts."""

    def __init__(self, path: Path, outputs: list[Output]):
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        at = 0
        for output in outputs:
            offsets = [at, at + output.nbytes]
            header[output.name] = {"dtype": CODES[output.dtype], "shape": output.shape, "data_offsets": offsets}
            at += output.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._next = {o.name: 8 + len(text) + header[o.name]["data_offsets"][0] for o in outputs}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(0, len(text).to_bytes(8, "little") + text)

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._file)
        finally:
            os.close(self._file)

    def append(self, name: str, values: mx.array) -> None:
        """The next values of a tensor, in its order."""
        data: Any = np.asarray(mx.contiguous(values).reshape(-1).view(mx.uint8))
        self._write(self._next[name], memoryview(data))
        self._next[name] += values.nbytes

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written


def write_text(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def copy(source: Path, destination: Path) -> None:
    with source.open("rb") as read, destination.open("xb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        os.fsync(written.fileno())


@contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """A temporary folder beside `destination`; whatever is still in it at the end is removed with it."""
    missing = [parent for parent in destination.absolute().parents if not parent.exists()]
    with named_errors(destination):
        try:
            folder, lock = _claim(destination)
            try:
                yield folder
            finally:
                os.close(lock)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            for parent in missing:
                with suppress(OSError):  # it holds the result
                    parent.rmdir()


def publish(folder: Path, destination: Path) -> None:
    """Give a finished temporary folder its name."""
    for path, _, _ in os.walk(folder):
        _sync(Path(path))
    os.rename(folder, destination)  # takes the place of an empty folder, fails on any other
    _sync(destination.parent)


def replace(file: Path, destination: Path) -> None:
    """Give a finished file its name, in the place of a file that may have had it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, destination)
    _sync(destination.parent)


def require_room(destination: Path, needed: int) -> None:
    free = shutil.disk_usage(existing(destination)).free
    if free < needed:
        raise CheckpointError(
            f"{destination}: {needed:,} bytes will be written and the disk has {free:,} free. "
            f"Free {needed - free:,} bytes, or write to another disk."
        )


def existing(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists."""
    path = path.absolute()
    return path if path.is_dir() else existing(path.parent)


@contextmanager
def named_errors(destination: Path) -> Iterator[None]:
    """What the system says of a write, as an error that names the folder and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem = "the disk is full. Nothing was left behind; free some room and try again"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            problem = f"{existing(destination)} cannot be written to ({error.strerror}). Choose another folder"
        else:
            problem = f"writing failed ({error.strerror or error}). Nothing was left behind"
        raise CheckpointError(f"{destination}: {problem}.") from error


def _claim(destination: Path) -> tuple[Path, int]:
    """A new locked folder; those of dead processes are removed. The parent's lock keeps claims apart."""
    parent, prefix = destination.parent, f".{destination.name}{MARK}"
    parent.mkdir(parents=True, exist_ok=True)
    gate = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(gate, fcntl.LOCK_EX)
        for left in parent.iterdir():
            if left.name.startswith(prefix) and _is_abandoned(left):
                shutil.rmtree(left, ignore_errors=True)
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # network disks may know no locks; there nothing is ever taken for abandoned
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(gate)
    return folder, lock


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:  # published or removed since it was listed
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
