"""The weights of mixed residual streams on Metal: see `streams.metal`."""

from collections.abc import Callable

import mlx.core as mx

from ..streams import HyperConnection, StreamWeights
from .choice import MOST_ROWS, Operation, Runs
from .device import metal_kernel
from .stock import StockMetal

THREADS = 32


def streams_shape(hc: HyperConnection) -> str:
    return f"{hc.streams}, {hc.iterations} times"


def metal_stream_weights(products: mx.array, hc: HyperConnection) -> StreamWeights:
    """Return what a hyper-connection makes of its products [..., (2 + S)·S]."""
    *shape, size = products.shape
    rows, count = products.size // size, hc.streams
    source = f"""
        const int row = int(thread_position_in_grid.x);
        if (row < products_shape[0])
          headstart::stream_weights<S>(
              products, scale, base, {hc.iterations}, {hc.eps!r}f, mean, shares, mixture, row);
    """
    made = metal_kernel("streams", ("products", "scale", "base"), ("mean", "shares", "mixture"), source, "streams")(
        inputs=[products.reshape(rows, size), hc.scale, hc.base],
        template=[("S", count)],
        grid=(-(-rows // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(*shape, count), (*shape, count), (*shape, count, count)],
        output_dtypes=[mx.float32] * 3,
    )
    return StreamWeights(*made)


def streams_operation(hc: HyperConnection) -> Operation:
    """Return the operation of these weights, and what may compute it."""
    size = (2 + hc.streams) * hc.streams
    products = mx.random.normal((MOST_ROWS, 1, size), key=mx.random.key(size))

    def weights(kernel: Callable[[mx.array, HyperConnection], StreamWeights]) -> Runs:
        def run(b: slice, w: slice) -> mx.array:
            mean, shares, mixture = kernel(products[b, w], hc)
            return mx.concatenate([mean, shares, mixture.flatten(-2)], axis=-1)

        return (run,)

    kernels = {"stock": weights(StockMetal().hyper_weights), "metal": weights(metal_stream_weights)}
    return Operation("streams", streams_shape(hc), lambda: kernels)
