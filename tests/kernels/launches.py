"""Kernels for GPUs as MLX's operations on the CPU: lazy as those of `mx.fast.metal_kernel` are, so that passes can be
remembered, memory be donated, and a step be described without being computed."""

import hashlib
import importlib.machinery
import importlib.util
import io
import re
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import nanobind

from compiled import CACHE, place
from headstart.kernels.cpu.build import COMMON, _mlx

SOURCE = Path(__file__).with_name("launch.cpp")


@cache
def extension() -> Any:
    """Return the module of `launch.cpp`, compiled if this is its first use."""
    versions = version("mlx"), version("nanobind"), sysconfig.get_config_var("EXT_SUFFIX"), *COMMON
    key = hashlib.sha256((SOURCE.read_text() + repr(versions)).encode()).hexdigest()[:16]
    path = CACHE / f"launch-{key}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / path.name
            _compile(made)
            place(made, path)
    loader = importlib.machinery.ExtensionFileLoader("headstart_launch", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _compile(made: Path) -> None:
    source = Path(nanobind.source_dir())
    robin_map = source.parent / "ext" / "robin_map" / "include"
    include = [nanobind.include_dir(), robin_map, _mlx() / "include", sysconfig.get_path("include")]
    flags = [*COMMON, "-O1", "-DNB_DOMAIN=mlx", "-shared", *(f"-I{folder}" for folder in include)]
    files = [str(source / "nb_combined.cpp"), str(SOURCE)]
    command = ["g++", *flags, *files, f"-L{_mlx() / 'lib'}", "-lmlx", "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True)


def launch(
    inputs: Sequence[mx.array],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[mx.Dtype],
    function: int = 0,
    grid: Sequence[int] = (),
) -> list[mx.array]:
    """Return the outputs of a kernel that runs when they are computed: `function` of the emulator, or nothing."""
    made: list[mx.array] = extension().launch(
        list(inputs), function, list(grid), [list(shape) for shape in shapes], list(dtypes)
    )
    return made


def address(array: mx.array) -> int:
    """Return where an array that was computed lies."""
    return int(extension().address(array))


def operations_of(arrays: Sequence[mx.array]) -> Counter[str]:
    """Return the operations that are described and not yet computed, by name."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return Counter(re.findall(r'\[label ="(\w+)", shape=rectangle\]', text.getvalue()))


def describe_only(name: str, *_: Any, **__: Any) -> Callable[..., list[mx.array]]:
    """Stand in for `mx.fast.metal_kernel`: the kernel has its inputs and outputs, and computes nothing."""

    def call(
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        **_: Any,
    ) -> list[mx.array]:
        return launch(inputs, output_shapes, output_dtypes)

    return call
