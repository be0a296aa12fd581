"""What every CUDA kernel of ours needs: its source, how it is launched, and whether there is a device to run it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx


def on_cuda() -> bool:
    return bool(mx.cuda.is_available()) and mx.default_device() == mx.gpu


def make_kernel(name: str, inputs: str, outputs: str, files: str, source: str, shared: int = 0) -> Any:
    """Return a kernel of MLX: its arguments, and the `.cu` files beside this one that it calls, by name.

    Kernels are functions in those files; what MLX wraps is a call of one. MLX hashes all of a kernel's text at every
    launch, so the text names the files and does not hold them.
    """
    header = "".join(f'#include "{Path(__file__).with_name(file)}.cu"\n' for file in files.split())
    return mx.fast.cuda_kernel(
        name=name,
        input_names=inputs.split(),
        output_names=outputs.split(),
        header=header,
        source=source,
        shared_memory=shared,
    )


def launch(
    kernel: Any,
    inputs: Sequence[mx.array],
    template: Mapping[str, Any],
    blocks: tuple[int, int, int],
    threads: int,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    """Run a kernel in blocks of so many threads. `outputs` are shapes and types."""
    made: list[mx.array] = kernel(
        inputs=inputs,
        template=list(template.items()),
        grid=(threads * blocks[0], *blocks[1:]),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    return made
