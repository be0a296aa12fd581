"""Find this process's place when `mlx.launch` has started a command on several machines.

The first machine goes on as if it were alone, with an engine that leads the others. The others follow it.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

from ..errors import ClusterError, DrafterError
from .download import find_drafter

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..cluster import Machines, Split
    from ..models import Model

# The variables for a process's rank and the number of ranks: those of mlx.launch, and those of MPI.
RANKS = {"MLX_RANK": "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE"}
DISTRIBUTED = ("generate", "serve")  # commands that run on several machines


def launched() -> bool:
    """Return whether this process is one of several. For a single one `mlx.launch` leaves the hostfile empty."""
    hostfile = Path(os.environ.get("MLX_HOSTFILE", os.devnull))
    if hostfile.is_file() and not hostfile.read_text().strip():
        return False
    return any(rank in os.environ and os.environ.get(size) != "1" for rank, size in RANKS.items())


def require_one_machine(command: str | None) -> None:
    """Refuse a command that would do the same work on every machine, and write it to the same files."""
    if command not in DISTRIBUTED and launched():
        raise ClusterError(
            f"{command} is for one machine, and mlx.launch has started it on several: start it by itself, or use "
            f"{' or '.join(DISTRIBUTED)}"
        )


@contextmanager
def connect_machines() -> Iterator["Machines | None"]:
    """Connect to the machines that were launched together. Yield None where there is only one."""
    if not launched():
        yield None
        return
    from .. import cluster

    with cluster.join_machines() as machines:
        # Ctrl-C and SIGTERM reach all of them: the first stops properly, and then stops the others.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if machines.rank else signal.default_int_handler)
        yield machines


class Parts(TypedDict):
    """What of a model is loaded beside its trunk."""

    mtp: bool | None
    head: str | None
    drafter: str | None
    kv_bits: int | None
    adapter_path: NotRequired[str | None]


def load_share(
    folder: Path, machines: "Machines | None", split: "Split" = "tensor", **parts: Unpack[Parts]
) -> "tuple[Model, TokenizerWrapper]":
    """Load the model, or this machine's share of it."""
    from .. import cluster, library

    drafter = find_drafter(parts["drafter"])
    if machines is None:
        path, kv_bits = parts.get("adapter_path"), parts["kv_bits"]
        return library.load(
            folder, mtp=parts["mtp"], head=parts["head"], drafter=drafter, kv_bits=kv_bits, adapter_path=path
        )
    for flag, value in (("--kv-bits", parts["kv_bits"]), ("--adapter-path", parts.get("adapter_path"))):
        if value is not None:
            raise ClusterError(f"{flag} is not available on several machines: leave it out")
    if drafter is not None:
        raise DrafterError(f"{drafter}: block drafters run on one machine only. Leave --drafter out.")
    return cluster.load_part(folder, machines.comm, split, mtp=parts["mtp"], head=parts["head"])
