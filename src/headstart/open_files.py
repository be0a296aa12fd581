"""Open files: the standard streams, texts, and the limit on their number, which mlx-lm changes when it is imported.

`mlx_lm.utils` calls `resource.setrlimit(RLIMIT_NOFILE, (2048, 4096))`: an error where the hard limit is lower, and
otherwise a cap that cannot be raised again. `protect` makes that one call do nothing. The package calls it before any
of its modules can import mlx-lm.
"""

import errno
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TextIO

MODULE = "mlx_lm.utils"
FOR_MODELS = 2048  # what mlx-lm sets, for checkpoints of many files
MAX_TEXT = 2**26  # characters: a device or a pipe may never end


def protect() -> None:
    """Let mlx-lm raise the soft limit when it is imported, and never lower the hard one."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def fill_standard_streams() -> None:
    """Open the null device where standard input, output or error is closed.

    Otherwise the next file takes its number: MLX cannot read a file that is number 0, and what a library prints would
    be written into the files that are 1 and 2.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def read_text(source: Path | TextIO) -> str:
    """Return what a file or a stream holds, or raise an OSError if that is more than `MAX_TEXT` characters."""
    with source.open(encoding="utf-8") if isinstance(source, Path) else nullcontext(source) as file:
        text = file.read(MAX_TEXT + 1)
    if len(text) > MAX_TEXT:
        raise OSError(errno.EFBIG, f"longer than {MAX_TEXT:,} characters")
    return text


def raise_limit(wanted: int) -> int:
    """Raise the soft limit towards `wanted`, as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while most > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
        except (ValueError, OSError):  # macOS has a further limit, kern.maxfilesperproc
            most //= 2
    return soft


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        setrlimit = resource.setrlimit
        resource.setrlimit = lambda which, limits: None
        try:
            super().exec_module(module)
        finally:
            resource.setrlimit = setrlimit
        raise_limit(FOR_MODELS)


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == MODULE else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
