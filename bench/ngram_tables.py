"""Time a token's rows of a table of n-gram embeddings, from the disk and from the system's cache.

    python bench/ngram_tables.py FOLDER [--gigabytes 8]

Writes a file of random bytes into FOLDER and removes it. Rows are as in Qwen3.8-Flash-Next: 16 a token, of 160
numbers in bfloat16, drawn from the whole file. Before a cold measurement the system is told to drop the file's pages.
"""

import argparse
import mmap
import os
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from headstart.checkpoint.safetensors import TensorInfo
from headstart.checkpoint.tables import MappedRows

ROWS, WIDTH = 16, 160  # of a token; numbers of a row
PIECE = 2**26


def write(file: Path, nbytes: int) -> None:
    rng = np.random.default_rng(0)
    with file.open("wb") as made:
        for _ in range(0, nbytes, PIECE):
            made.write(rng.bytes(PIECE))
        made.flush()
        os.fsync(made.fileno())


def drop(file: Path) -> None:
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class OneByOne(MappedRows):
    """Rows as the processor faults on them."""

    def _ask(self, part: np.ndarray, local: np.ndarray) -> None:
        pass


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def measure(table: MappedRows, tokens: list[np.ndarray]) -> float:
    """Milliseconds per token, the median."""
    times = []
    for rows in tokens:
        start = time.perf_counter()
        mx.eval(table(rows))
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8)
    options = parser.parse_args()
    file = options.folder / "ngram-table.bin"
    try:
        write(file, int(options.gigabytes * 1e9))
        count = file.stat().st_size // (2 * WIDTH)
        part = TensorInfo("table", mx.bfloat16, (count, WIDTH), file, 0)
        rng, before = np.random.default_rng(1), resident()
        for what, width, repeats in (("a token", 1, 200), ("a window of 4", 4, 100), ("a prompt of 512", 512, 4)):
            tokens = [rng.integers(0, count, (1, width, ROWS)) for _ in range(repeats)]
            for kind in (MappedRows, OneByOne):
                drop(file)
                table = kind((part,))
                cold = measure(table, tokens)
                warm = measure(table, tokens)
                name = "asked together" if kind is MappedRows else "one by one"
                print(f"{what:16} {name:15} cold {cold:9.3f} ms   warm {warm:7.3f} ms")
        print(
            f"resident memory grew by {(resident() - before) / 1e6:.0f} MB; the file has {count * 320 / 1e9:.1f} GB"
        )
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
