"""What decides the bits of an answer, in short: the `system_fingerprint` of responses."""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from hashlib import file_digest, sha256
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import mlx.core as mx

from .. import __version__
from ..models import Model

PACKAGES = ("kernels", "models", "sampling", "state")  # whose sources compute
LIBRARIES = ("mlx", "mlx-lm", "transformers", "tokenizers", "llguidance")
SOURCES = (".py", ".cpp", ".h", ".cu", ".cuh", ".metal")
SUFFIXES = (".safetensors", ".gguf", ".json", ".jinja", ".txt", ".model")
LENGTH = 8  # hexadecimal digits of a part
THREADS = re.compile(r", \d+ threads")  # of the CPU's kernels: their number changes no bit


class Fingerprint:
    """`b`, and three parts with dashes between them: of the model's files, of what computes, and of the versions.

    The files are read in a thread of their own, seconds for a large model.
    """

    def __init__(self, folders: list[Path], model: Model):
        """`folders`: of the model and of its adapters."""
        self.text: str | None = None  # until the files have been read
        self._folders, self._model = folders, model
        Thread(target=self._compute, name="fingerprint", daemon=True).start()

    def _compute(self) -> None:
        with suppress(OSError):  # it remains unknown
            parts = (_digest(files_of(self._folders)), compute_part(self._model), versions_part())
            self.text = "b" + "-".join(part[:LENGTH] for part in parts)


def compute_part(model: Model) -> str:
    """Return the digest of the sources that compute, and of where and how they do."""
    device = mx.device_info()
    backend = THREADS.sub("", str(model.backend))
    how = (backend, device.get("architecture"), model.dtype, model.eight_bit_kv, model.share.ranks, sources_part())
    return sha256(repr(how).encode()).hexdigest()


@cache
def sources_part(root: Path = Path(__file__).parents[1]) -> str:
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*")))
    return _digest(file for file in files if file.suffix in SOURCES)


@cache
def versions_part() -> str:
    return sha256(repr((__version__, [version(each) for each in LIBRARIES])).encode()).hexdigest()


def files_of(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        files = folder.iterdir() if folder.is_dir() else [folder]
        yield from sorted(file for file in files if file.suffix in SUFFIXES)


def _digest(files: Iterator[Path]) -> str:
    """Return the digest of files' names and contents."""
    digest = sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name}\0{file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
