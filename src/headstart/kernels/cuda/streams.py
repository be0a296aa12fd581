"""The weights of mixed residual streams on CUDA: see `streams.cu`."""

from functools import cache
from typing import Any

import mlx.core as mx

from ..streams import HyperConnection, StreamWeights
from .compiler import cuda_kernel
from .device import include

THREADS = 32


def launch_stream_weights(products: mx.array, hc: HyperConnection) -> StreamWeights:
    """Return what a hyper-connection makes of its products [..., (2 + S)·S]: a thread for a row of them."""
    *shape, size = products.shape
    rows, count = products.size // size, hc.streams
    made = _streams_kernel(hc.iterations, hc.eps)(
        inputs=[products.reshape(rows, size), hc.scale, hc.base],
        template=[("S", count)],
        grid=(-(-rows // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(*shape, count), (*shape, count), (*shape, count, count)],
        output_dtypes=[mx.float32] * 3,
    )
    return StreamWeights(*made)


@cache
def _streams_kernel(iterations: int, eps: float) -> Any:
    return cuda_kernel(
        name="streams",
        input_names=["products", "scale", "base"],
        output_names=["mean", "shares", "mixture"],
        header=include("streams"),
        source=f"""
            const int row = blockIdx.x * blockDim.x + threadIdx.x;
            if (row < products_shape[0])
              headstart::stream_weights<S>(
                  products, scale, base, {iterations}, {eps!r}f, mean, shares, mixture, row);
        """,
    )
