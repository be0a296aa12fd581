"""mlx compiles on CPU with g++ into a temporary directory: make sure that it can, or do without."""

import logging
import os
import shutil
import tempfile
from functools import lru_cache

import mlx.core as mx
from mlx_lm.models.activations import swiglu

LOG = logging.getLogger("headstart")


@lru_cache
def ensure_compiles() -> None:
    """Turn `mx.compile` off where it would fail. Operations then run one by one: slower, and rounded as such."""
    problem = _problem()
    if problem:
        mx.disable_compile()
        LOG.warning("mlx cannot compile for the CPU (%s): decoding is slower without", problem)


def _problem() -> str | None:
    try:
        # Python passes over a TMPDIR that cannot be written to, and mlx fails on it.
        os.environ["TMPDIR"] = tempfile.gettempdir()
    except FileNotFoundError:
        return "no temporary directory can be written to; set TMPDIR to one that can"
    if shutil.which("g++") is None:
        return "no g++ is on the PATH; install it"
    try:
        mx.eval(swiglu(mx.zeros((1, 8)), mx.zeros((1, 8))))  # every model needs this one
    except RuntimeError as error:  # a disk that is full, a directory from which nothing may be executed
        return f"{str(error).splitlines()[0]}; set TMPDIR to another directory"
    return None
