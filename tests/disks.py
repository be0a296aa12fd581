"""Disks that refuse: read-only ones, and small ones. Root writes everywhere else, so both are mounted for it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def read_only_folder(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    if os.geteuid() == 0:
        with _tmpfs(folder, "ro"):
            yield folder
        return
    folder.chmod(0o555)
    try:
        yield folder
    finally:
        folder.chmod(0o755)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    with _tmpfs(folder, f"size={size}"):
        yield folder


@contextmanager
def _tmpfs(folder: Path, options: str) -> Iterator[None]:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("cannot mount a disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)
