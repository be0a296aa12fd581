"""Join the processes that `mlx.launch` has started together, and load this rank's part of a model."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint import load_model, load_tokenizer, resolve
from ..errors import ClusterError
from ..models import Model
from .communicator import Communicator
from .link import Link, connect
from .parallel import PipelineParallel, TensorParallel

Split = Literal["tensor", "pipeline"]


@dataclass(frozen=True, eq=False)
class Machines:
    """A cluster, as one of its ranks sees it."""

    comm: Communicator
    link: Link

    @property
    def rank(self) -> int:
        return self.comm.rank


@contextmanager
def join_machines() -> Iterator[Machines]:
    """Connect to the other ranks, through the backend that `mlx.launch` was given. An error ends all ranks."""
    try:
        comm = Communicator(mx.distributed.init(strict=True))
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"the machines cannot reach each other: {error}. See docs/guides/cluster.md") from error
    link = connect(comm)
    try:
        yield Machines(comm, link)
        mx.synchronize()  # other ranks may wait for this one in a step
    except BaseException as error:
        atexit.register(_exit_now)
        link.close(error)
        raise
    link.close()


def load_part(
    path: str | Path | None,
    comm: Communicator,
    split: Split = "tensor",
    *,
    mtp: bool | None = None,
    head: str | Path | None = None,
    dtype: mx.Dtype | None = None,
) -> tuple[Model, TokenizerWrapper]:
    """Load this rank's part of a model, and its tokenizer. The checkpoint must be on every machine."""
    folder = resolve(path)
    parallel = TensorParallel if split == "tensor" else PipelineParallel
    model = load_model(folder, mtp=mtp, head=head, dtype=dtype, split=lambda config: parallel.of(config, comm))
    return model, load_tokenizer(folder)


def _exit_now() -> None:
    """Exit without waiting for the device, which may wait for ever for a rank that is gone."""
    try:
        sys.stdout.flush()
    finally:
        os._exit(1)
