"""What every Metal kernel of ours needs: its source, and whether there is a device to run it."""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx


def type_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


@cache
def metal_sources(*names: str) -> str:
    """Return the text of `.metal` files beside this one: what Metal compiles at run time cannot include files."""
    return "".join(Path(__file__).with_name(f"{name}.metal").read_text() for name in ("common", *names))


@cache
def metal_kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, *headers: str) -> Any:
    """Return a kernel by its source. MLX compiles a kernel anew when another source comes by its name, so the name
    holds a hash."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    return mx.fast.metal_kernel(
        name=f"headstart_{name}_{digest}",
        input_names=list(inputs),
        output_names=list(outputs),
        source=source,
        header=metal_sources(*headers),
        compile_options={"math_mode": "safe"},
    )
