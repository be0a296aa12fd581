"""Entries of the prefix cache on a disk: written in a thread of its own, found again by the next process.

A file holds the KV cache of one chunk (`.kv`) or the snapshot at its end (`.state`). Its name is a hash of all tokens
up to there and of everything that decides the bits of a state (`identity`), and it ends with a checksum. It gets its
name when it is complete and synced, so that a process may be killed at any time. A file that is not as it should be
is removed and counts as missing. Processes may share a folder: each sees what the others have written.
"""

import atexit
import hashlib
import io
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

import mlx.core as mx

from ..errors import HeadstartError
from ..thread_exit import wait_at_exit
from .snapshot import PackedArray, Snapshot

MARKER = "headstart-prefix-cache"  # a file that says whose folder it is
MAX_WAITING = 4  # prefixes that wait to be written; the oldest is dropped, because it is kept in memory longer
PAUSE = 60.0  # seconds without a write after one failed
FLUSH = 10.0  # seconds at exit to write what waits
SUFFIXES = (".kv", ".state")
LOG = logging.getLogger("headstart")


class PrefixFolderError(HeadstartError):
    """The folder cannot hold a prefix cache."""


class Waiting(NamedTuple):
    names: list[str]  # of the chunks from the first on
    packs: list[list[PackedArray]]
    after: Snapshot


class DiskPrefix:
    """The entries of one model in `folder`, of which all files together take at most `max_bytes`."""

    def __init__(self, folder: Path, identity: str, max_bytes: int):
        _claim(folder)
        self.max_bytes = max_bytes
        self._root = folder
        self._identity = hashlib.sha256(identity.encode()).digest()
        self._folder = folder / self._identity.hex()[:16]
        with _folder_errors(folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
        self._remove_partial()
        self._room = 0  # bytes to write before the folder's size is looked at again
        self._paused_until = 0.0
        self._queue: deque[Waiting] = deque(maxlen=MAX_WAITING)
        self._busy = self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="prefix cache", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def names(self, chunks: Sequence[bytes]) -> list[str]:
        """Return the names of a prompt's chunks: hashes of their tokens and of all before them."""
        digest, names = self._identity, []
        for chunk in chunks:
            digest = hashlib.sha256(digest + chunk).digest()
            names.append(digest.hex())
        return names

    def longest(self, names: Sequence[str], in_memory: int) -> Iterator[int]:
        """Yield how many chunks could be resumed after, most first, if memory holds the first `in_memory`."""
        there = in_memory
        while there < len(names) and self._path(names[there] + ".kv").exists():
            there += 1
        yield from (count for count in range(there, 0, -1) if self._path(names[count - 1] + ".state").exists())

    def load(
        self, names: Sequence[str], in_memory: int, count: int
    ) -> tuple[list[list[PackedArray]], Snapshot] | None:
        """Read the chunks that memory lacks of the first `count`, and the snapshot after them."""
        states = self._read(names[count - 1] + ".state")
        packs = [self._read(name + ".kv") for name in names[in_memory:count]] if states is not None else []
        if states is None or None in packs:
            return None
        self._touch(names[:count])
        (hidden,), *recurrent = states
        return [pack for pack in packs if pack is not None], Snapshot(hidden, [tuple(arrays) for arrays in recurrent])

    def save(self, names: list[str], packs: list[list[PackedArray]], after: Snapshot) -> None:
        """Write a prefix soon, without waiting for it. All arrays must have been evaluated."""
        with self._changed:
            self._queue.append(Waiting(names, packs, after))
            self._changed.notify_all()

    def flush(self, seconds: float = FLUSH) -> bool:
        """Wait until nothing is left to write, or the time is over. Return whether all is written."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, seconds)

    def close(self) -> None:
        """Write what waits, within FLUSH seconds, and end the thread."""
        atexit.unregister(self.close)
        self.flush()
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(FLUSH)

    def _run(self) -> None:
        wait_at_exit()
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                waiting, self._busy = self._queue.pop(), True  # the newest first: it includes the beginning of others
            try:
                self._write_all(waiting)
            except Exception as error:
                self._paused_until = time.monotonic() + PAUSE
                LOG.warning("%s: a prefix could not be written, none will be for %g s (%s)", self._root, PAUSE, error)

    def _write_all(self, waiting: Waiting) -> None:
        nbytes = waiting.after.nbytes + sum(a.nbytes for packs in waiting.packs for pack in packs for a in pack)
        if time.monotonic() < self._paused_until or nbytes > self.max_bytes:
            return
        self._touch(waiting.names)
        for name, packs in zip(waiting.names, waiting.packs, strict=True):
            self._write(name + ".kv", packs)
        self._write(waiting.names[-1] + ".state", [(waiting.after.hidden,), *waiting.after.recurrent])
        self._touch(waiting.names)

    def _write(self, name: str, groups: Sequence[PackedArray]) -> None:
        path = self._path(name)
        if path.exists():
            return
        buffer = io.BytesIO()
        mx.save_safetensors(buffer, {f"{i}.{j}": a for i, group in enumerate(groups) for j, a in enumerate(group)})
        data = buffer.getbuffer()
        self._make_room(len(data) + 32)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "wb") as file:
                file.write(data)
                file.write(_checksum(name, data))
                file.flush()
                os.fsync(descriptor)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _read(self, name: str) -> list[PackedArray] | None:
        path = self._path(name)
        try:
            data = memoryview(path.read_bytes())
            if _checksum(name, data[:-32]) != data[-32:]:
                raise ValueError("its checksum is wrong")
            arrays: dict[str, mx.array] = mx.load(io.BytesIO(data[:-32]), format="safetensors")  # type: ignore[assignment]
            mx.eval(arrays)
        except FileNotFoundError:
            return None
        except Exception as error:
            LOG.warning("%s: this entry of the prefix cache is removed (%s)", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        groups: dict[int, list[mx.array]] = {}
        for key in sorted(arrays, key=lambda key: [int(part) for part in key.split(".")]):
            groups.setdefault(int(key.split(".")[0]), []).append(arrays[key])
        return [tuple(group) for group in groups.values()]

    def _path(self, name: str) -> Path:
        return self._folder / name

    def _touch(self, names: Sequence[str]) -> None:
        """Mark a prefix as used. Its beginning counts as used last: without it the rest is useless."""
        now = time.time_ns()
        for age, name in enumerate(names):
            for suffix in SUFFIXES:
                with suppress(OSError):
                    os.utime(self._path(name + suffix), ns=(now - age, now - age))

    def _files(self) -> list[tuple[int, int, Path]]:
        """Return time of last use, size and path of the files of all models."""
        files = []
        for path in self._root.glob("*/*"):
            with suppress(OSError):  # another process has removed it
                status = path.lstat()
                files.append((status.st_mtime_ns, status.st_size, path))
        return sorted(files)

    def _remove_partial(self) -> None:
        """Remove what a killed process had begun. A live one takes less than an hour for a file."""
        for used, _, path in self._files():
            if path.suffix == ".partial" and time.time() - used / 1e9 > 3600:
                with suppress(OSError):
                    path.unlink()

    def _make_room(self, nbytes: int) -> None:
        """Remove the files that were not used for longest, until `nbytes` fit."""
        if nbytes > self._room:
            files = self._files()
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total + nbytes <= self.max_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= size
            self._room = min(self.max_bytes - total, max(nbytes, self.max_bytes // 64))
        self._room -= nbytes


def _checksum(name: str, data: memoryview) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(data)
    return digest.digest()


def _claim(folder: Path) -> None:
    """Make the folder ours alone. Raise PrefixFolderError if it is not: what lies in it decides answers."""
    with _folder_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, marker = folder.lstat(), folder / MARKER
        if folder.is_symlink() or status.st_uid != os.getuid():
            raise PrefixFolderError(f"{folder} is not a folder of yours: choose another")
        if not marker.exists():
            if any(folder.iterdir()):
                raise PrefixFolderError(f"{folder} holds other files: choose an empty or a new folder")
            folder.chmod(0o700)
            marker.write_text("Prefixes that `headstart serve` has computed. They may be deleted at any time.\n")
        elif status.st_mode & 0o077:
            raise PrefixFolderError(f"{folder} is open to others: delete it, or run chmod 700 {folder}")


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PrefixFolderError(f"{folder} cannot be used ({error.strerror}): choose another") from error
