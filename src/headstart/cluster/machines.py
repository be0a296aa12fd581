"""Join the processes that `mlx.launch` has started together, and load this rank's part of a model."""

import atexit
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import load, load_tokenizer, resolve
from ..errors import ClusterError
from ..models import Model
from .communicator import Communicator
from .link import Link, connect
from .parallel import PipelineParallel, TensorParallel

Split = Literal["tensor", "pipeline"]


@dataclass(frozen=True, eq=False)
class Machines:
    """A cluster, as one of its ranks sees it. Use it in a `with` block: leaving it ends the other ranks too."""

    comm: Communicator
    link: Link

    @property
    def rank(self) -> int:
        return self.comm.rank

    def __enter__(self) -> "Machines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            mx.synchronize()  # other ranks may wait for this one in a step
        else:
            atexit.register(_exit_now)
        self.link.close(error)


def join_machines() -> Machines:
    """Connect to the other ranks, through the backend that `mlx.launch` was given."""
    try:
        group = mx.distributed.init(strict=True)
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"the machines cannot reach each other: {error}. See docs/cluster.md") from error
    comm = Communicator(group)
    return Machines(comm, connect(comm))


def load_part(
    path: str | Path | None,
    comm: Communicator,
    split: Split = "tensor",
    *,
    mtp: bool | None = None,
    dtype: mx.Dtype | None = None,
) -> tuple[Model, TokenizerWrapper]:
    """Load this rank's part of a model, and its tokenizer. The checkpoint must be on every machine."""
    folder = resolve(path)
    parallel = TensorParallel if split == "tensor" else PipelineParallel
    model = load(folder, mtp=mtp, dtype=dtype, split=lambda config: parallel.of(config, comm))
    return model, load_tokenizer(folder)


def _exit_now() -> None:
    """Exit without waiting for the device, which may wait for ever for a rank that is gone."""
    try:
        sys.stdout.flush()
    finally:
        os._exit(1)
