"""The order of kernels that write into a cache in place.

MLX on Metal orders kernels by the arrays that they put out. One that writes into its input puts out a few numbers
besides (`after` in `attention.py`), which the next such kernel of the thread takes: so each sees what all before it
have written. What a kernel wrote over, others had read: a window begins with tokens that come from those reads.
"""

import threading

import mlx.core as mx

from .attention import ORDER


class Order(threading.local):
    """Hold what the last such kernel of a thread put out. Other threads cannot evaluate it while it is traced."""

    def __init__(self) -> None:
        self.last = nothing()


def nothing() -> mx.array:
    """Return what comes before the first kernel."""
    return mx.array([0.0] * ORDER)  # computed already
