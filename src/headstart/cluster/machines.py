"""The processes that `mlx.launch` has started together, as one of them sees it."""

import atexit
import os
import sys
from dataclasses import dataclass
from types import TracebackType

import mlx.core as mx

from ..errors import ClusterError
from .link import Link, connect
from .wire import Wire


@dataclass(frozen=True, eq=False)
class Machines:
    """Close it, best by `with`: the others wait for a word, and an error that ends this one ends them too."""

    wire: Wire
    link: Link

    @property
    def rank(self) -> int:
        return self.wire.rank

    def __enter__(self) -> "Machines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            mx.synchronize()  # a round may be under way, in which others wait for this one
        else:
            atexit.register(_leave)
        self.link.close(error)


def join() -> Machines:
    """Meet the others, through whatever backend they were launched with."""
    try:
        group = mx.distributed.init(strict=True)
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"the machines cannot reach each other: {error}. See docs/cluster.md") from error
    wire = Wire(group)
    return Machines(wire, connect(wire))


def _leave() -> None:
    """Exit without the device, which may wait for ever for those who are gone, and the interpreter for it."""
    try:
        sys.stdout.flush()
    finally:
        os._exit(1)
