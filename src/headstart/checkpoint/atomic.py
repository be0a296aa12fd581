"""Write files so that a crash, a full disk or Ctrl-C leaves either the whole result or none of it.

Everything is written and synced to a temporary folder on the same disk, and moved to its place at the end. A process
locks its temporary folder, and the lock ends with the process: the next one that writes to the same place removes
folders without a lock.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_text(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, destination: Path) -> None:
    with source.open("rb") as read, destination.open("xb") as written:
        shutil.copyfileobj(read, written)
        written.flush()
        os.fsync(written.fileno())


@contextmanager
def staging_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `destination`; what is still in it at the end is removed with it."""
    missing = [parent for parent in destination.absolute().parents if not parent.exists()]
    with _write_errors(destination):
        try:
            folder, lock = _locked_folder(destination)
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


def replace_file(file: Path, destination: Path) -> None:
    """Move a finished file to its place, over a file that may be there."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, destination)
    _sync(destination.parent)


def require_space(destination: Path, needed: int) -> None:
    """Raise a CheckpointError if the disk of `destination` has less than `needed` bytes free."""
    free = free_space(destination)
    if free < needed:
        raise CheckpointError(
            f"{destination}: {needed:,} bytes will be written and the disk has {free:,} free. "
            f"Free {needed - free:,} bytes, or write to another disk."
        )


def free_space(path: Path) -> int:
    return shutil.disk_usage(_existing_parent(path)).free


def _existing_parent(path: Path) -> Path:
    """Return the path itself or the nearest folder above it that exists."""
    path = path.absolute()
    return path if path.is_dir() else _existing_parent(path.parent)


@contextmanager
def _write_errors(destination: Path) -> Iterator[None]:
    """Turn the system's errors into a CheckpointError that names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            problem = "the disk is full. Nothing was left behind; free some space and try again"
        elif error.errno in NOT_WRITABLE:
            problem = (
                f"{_existing_parent(destination)} cannot be written to ({error.strerror}). Choose another folder"
            )
        else:
            problem = f"writing failed ({error.strerror or error}). Nothing was left behind"
        raise CheckpointError(f"{destination}: {problem}.") from error


def _locked_folder(destination: Path) -> tuple[Path, int]:
    """Create and lock a folder beside `destination`, and remove those of dead processes."""
    parent, prefix = destination.parent, f".{destination.name}.headstart-"
    parent.mkdir(parents=True, exist_ok=True)
    gate = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # without it another process could remove the folder before it is locked
            fcntl.flock(gate, fcntl.LOCK_EX)
        for folder in parent.iterdir():
            if folder.name.startswith(prefix) and _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # network disks may have no locks; there no folder ever counts as abandoned
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
