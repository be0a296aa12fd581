"""The commands that run a model, when `mlx.launch` has started them on several machines.

The first of them goes on as if it were alone, with an engine that leads the others'. The others follow it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..cluster import Machines, Split
    from ..models import Model


@contextmanager
def joined() -> Iterator["Machines | None"]:
    """Those that were launched together; None where there is but one."""
    from ..cluster import join, launched

    if not launched():
        yield None
        return
    with join() as machines:
        if machines.rank:  # Ctrl-C reaches all of them, and the first says when to stop
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        yield machines


def load(
    path: str | Path | None, machines: "Machines | None", split: "Split", *, mtp: bool | None
) -> "tuple[Model, TokenizerWrapper]":
    """The model, or this machine's part of it."""
    from .. import cluster, library

    if machines is None:
        return library.load(path, mtp=mtp)
    return cluster.load(path, machines.wire, split, mtp=mtp)
