"""RMS norm with the addition before it, on Metal: see `norm.metal`."""

import mlx.core as mx

from .device import metal_kernel, type_name


def norm_shape(x: mx.array) -> str:
    return f"{x.shape[-1]}, {type_name(x.dtype)}"


def metal_norm(x: mx.array, added: mx.array | None, weight: mx.array, eps: float) -> list[mx.array]:
    """Return the norm of x [..., D]; with `added`, x + added and its norm."""
    adds, size = added is not None, x.shape[-1]
    threads = min(256, -(-size // 32) * 32)
    source = f"""
        threadgroup float parts[THREADS / 32];
        headstart::norm<D, THREADS, {str(adds).lower()}>(
            x, {"added" if adds else "x"}, weight, {eps!r}f, {"total" if adds else "normed"}, normed, parts,
            int(threadgroup_position_in_grid.x), int(thread_index_in_threadgroup));
    """
    inputs, outputs = ("x", *["added"] * adds, "weight"), (*["total"] * adds, "normed")
    return list(
        metal_kernel("norm", inputs, outputs, source, "norm")(
            inputs=[x, *([added] if added is not None else []), weight],
            template=[("T", x.dtype), ("D", size), ("THREADS", threads)],
            grid=(x.size // size * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[x.shape] * len(outputs),
            output_dtypes=[x.dtype] * len(outputs),
        )
    )
