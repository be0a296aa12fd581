"""Write files so that a crash, a full disk or Ctrl-C leaves either the whole result or none of it.

Everything is written to a temporary folder on the same disk, synced, and moved to its place at the end.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def staging_folder(destination: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `destination`; what is in it at the end is removed with it.

    The folder is locked, and the lock ends with the process: what a killed process left behind is removed by the next
    one that writes to the same place.
    """
    folder = destination.parent / f".{destination.name}.headstart-partial"
    with _write_errors(destination):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, destination):
            try:
                for left in folder.iterdir():
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, destination: Path) -> None:
    """Give a finished temporary folder its name."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)
    os.rename(folder, destination)  # takes the place of an empty folder, fails on any other
    _sync(destination.parent)


def replace_file(file: Path, destination: Path) -> None:
    """Move a finished file to its place, over a file that may be there."""
    _sync(file)
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
    return shutil.disk_usage(_existing_folder(path)).free


def _existing_folder(path: Path) -> Path:
    """Return the path itself or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


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
                f"{_existing_folder(destination)} cannot be written to ({error.strerror}). Choose another folder"
            )
        else:
            problem = f"writing failed ({error.strerror or error}). Nothing was left behind"
        raise CheckpointError(f"{destination}: {problem}.") from error


@contextmanager
def _locked(folder: Path, destination: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{destination}: another process is writing to it. Wait for it.") from None
        except OSError:  # a network disk without locks
            pass
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
