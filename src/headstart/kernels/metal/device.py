"""What every Metal kernel of ours needs: its source, and what the device has."""

import hashlib
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

MATRIX_UNITS = 17  # the generation of Apple's GPUs, M5, that has them; of phones it is the next
NEEDS = (26, 2)  # macOS


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


def has_matrix_units() -> bool:
    """Return whether MLX uses a GPU's matrix units, as mlx/backend/metal/device.cpp decides it."""
    found = re.search(r"g(\d+)(\w)$", str(mx.device_info().get("architecture", "")))
    version = tuple(int(part) for part in re.findall(r"\d+", platform.mac_ver()[0])[:2])
    return bool(found) and int(found[1]) >= MATRIX_UNITS + (found[2] == "p") and version >= NEEDS  # type: ignore[index]
