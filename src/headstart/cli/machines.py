"""The commands that run a model, when `mlx.launch` has started them on several machines.

The first of them goes on as if it were alone, with an engine that leads the others'. The others follow it.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ClusterError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..cluster import Machines, Split
    from ..models import Model

# A process's own number and how many there are, as mlx.launch sets them, and those of MPI.
RANKS = {"MLX_RANK": "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE"}
TOGETHER = ("generate", "serve")


def launched() -> bool:
    """Was this process started as one of several? For a single one `mlx.launch` leaves the hostfile empty."""
    hostfile = Path(os.environ.get("MLX_HOSTFILE", os.devnull))
    if hostfile.is_file() and not hostfile.read_text().strip():
        return False
    return any(rank in os.environ and os.environ.get(size) != "1" for rank, size in RANKS.items())


def check(command: str | None) -> None:
    """Others would do the same work on every machine, and write it to the same files."""
    if command not in TOGETHER and launched():
        raise ClusterError(
            f"{command} is for one machine, and mlx.launch has started it on several: start it by itself, or use "
            f"{' or '.join(TOGETHER)}"
        )


@contextmanager
def joined() -> Iterator["Machines | None"]:
    """Those that were launched together; None where there is but one."""
    if not launched():
        yield None
        return
    from ..cluster import join_machines

    with join_machines() as machines:
        # Ctrl-C and whoever ends a service reach all of them: the first stops in peace, and then tells the others.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if machines.rank else signal.default_int_handler)
        yield machines


def load(
    path: str | Path | None, machines: "Machines | None", split: "Split", *, mtp: bool | None
) -> "tuple[Model, TokenizerWrapper]":
    """The model, or this machine's part of it."""
    from .. import cluster, library

    if machines is None:
        return library.load(path, mtp=mtp)
    return cluster.load_part(path, machines.comm, split, mtp=mtp)
