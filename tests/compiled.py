"""Shared libraries that tests compile with g++, kept in the user's cache from one run to the next.

Each file appears there at once and complete, and never changes: any number of workers and runs may share it.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart-tests"
MAPS = Path("/proc/self/maps")
MLX_FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")  # as in mlx/backend/cpu/jit_compiler.cpp


class CompiledFunctions:
    """What `mx.compile` builds on a CPU: in a folder under $TMPDIR, which no two processes may share without a lock.

    A worker's folder gets what others have compiled so far, and others get what this process has loaded: those
    libraries are complete.
    """

    def __init__(self, tmpdir: Path) -> None:
        self.active = shutil.which("g++") is not None and MAPS.exists()
        if not self.active:
            return
        self.local = tmpdir / "mlx" / version("mlx") / "cpu"
        compiler = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
        key = hashlib.sha256(compiler.encode()).hexdigest()[:16]
        self.shared = CACHE / f"mlx-{version('mlx')}-{key}"
        for folder in (self.local, self.shared):
            folder.mkdir(parents=True, exist_ok=True)
        precompile_mlx(self.shared / "bin")
        self.known: set[str] = set()
        self.fetch()  # before test modules load models

    def fetch(self) -> None:
        if self.active:
            for name in set(_libraries(self.shared)) - self.known:
                if not (self.local / name).exists():
                    (self.local / name).symlink_to(self.shared / name)
                self.known.add(name)

    def publish(self) -> None:
        new = set(_libraries(self.local)) - self.known if self.active else set()
        if not new:
            return
        loaded = {line.rstrip().rpartition("/")[2] for line in MAPS.read_text().splitlines()}
        for name in new & loaded:
            place(self.local / name, self.shared / name)
            self.known.add(name)


def precompile_mlx(folder: Path) -> None:
    """Have mlx find a g++ that has read mlx's header already, which is most of what it does for a function."""
    if str(folder) in os.environ["PATH"].split(os.pathsep):
        return
    spec = find_spec("mlx.core")
    assert spec is not None
    assert spec.origin is not None
    include, name = Path(spec.origin).parent / "include", "mlx/backend/cpu/compiled_preamble.h"
    path = folder / f"{name}.gch"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            made, wrapper = Path(scratch) / path.name, Path(scratch) / "g++"
            command = ["g++", *MLX_FLAGS, f"-I{include}", "-x", "c++-header", str(include / name), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True)
            wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -I{folder} "$@"\n')
            wrapper.chmod(0o755)
            place(wrapper, folder / "g++")
            place(made, path)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _libraries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".so")]


def place(made: Path, path: Path) -> None:
    """Copy a file to where others find it, in one step."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        shutil.copy(made, Path(folder) / made.name)
        (Path(folder) / made.name).replace(path)


@cache
def library(text: str, header: Path, *flags: str) -> ctypes.CDLL:
    """Return the library of a source that includes this header."""
    if shutil.which("g++") is None or sys.platform == "darwin":  # whose g++ is clang
        pytest.skip("the kernels' source runs on a CPU where there is a g++")
    folder = precompiled("g++", header, *flags)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / path.name
            command = ["g++", *flags, "-shared", f"-I{folder}", f"-I{header.parent}", "-x", "c++", "-"]
            subprocess.run([*command, "-o", str(made)], input=text, text=True, check=True)
            place(made, path)
    return ctypes.CDLL(str(path))


@cache
def precompiled(compiler: str, header: Path, *flags: str) -> Path:
    """Return a folder with the header as the compiler reads it fastest, for these flags, compiler and processor."""
    target = ["--version"], ["-Q", "--help=target"] if compiler == "g++" else ["--version"]
    versions = [
        subprocess.run([compiler, *flags, *each], check=True, capture_output=True, text=True).stdout
        for each in target  # the second says what -march=native is here
    ]
    headers = [file.read_text() for file in sorted(header.parent.glob("*.h"))]
    key = hashlib.sha256("\n".join([*versions, *flags, *headers]).encode()).hexdigest()[:16]
    folder = CACHE / f"{header.stem}-{key}"
    path = folder / f"{header.name}.gch"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / path.name
            subprocess.run([compiler, *flags, "-x", "c++-header", str(header), "-o", str(made)], check=True)
            place(made, path)
    return folder
