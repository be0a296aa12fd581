"""Kernels for Apple GPUs, the counterparts of `kernels/cuda`.

Each `.metal` file holds functions; what MLX wraps into a kernel is a call of one. They were run on a CPU by
`tests/kernels/metal_on_cpu.py` only, never on a Mac: `kernels/metal/choice.py` checks and times them on the user's
machine before any is used.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx


def on_metal() -> bool:
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


@cache
def header(*names: str) -> str:
    """Return the text of `.metal` files beside this one: run-time compilation on Metal cannot include files."""
    return "".join(Path(__file__).with_name(f"{name}.metal").read_text() for name in ("common", *names))


@cache
def metal_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, *headers: str) -> Any:
    """Return a kernel by its source. MLX forgets a compiled kernel when another source comes by its name, so the name
    holds a hash."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    return mx.fast.metal_kernel(
        name=f"headstart_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=header(*headers),
        compile_options={"math_mode": "safe"},
    )
