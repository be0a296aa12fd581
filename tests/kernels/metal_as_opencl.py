"""The text of a Metal kernel exactly as MLX compiles it, checked as C++ for OpenCL: a language with Metal's address
spaces, which clang knows. MLX prints the text where it traces a function, also where there is no Metal.

What OpenCL allows and Metal does not is found by `complaints`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from headstart.state import KV

HEADER = Path(__file__).with_name("metal_as_opencl.h").read_text()
FLAGS = ["-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-cl-no-stdinc", "-fsyntax-only", "-Werror"]
# No doubles, and no generic address space: a pointer that does not name its own is one to a thread's memory.
FLAGS += ["-Wno-unknown-pragmas", "-Xclang", "-cl-ext=-all,+cl_khr_fp16", "-ferror-limit=5"]
SPACE = r"\b(thread|device|constant|threadgroup)\b"


@dataclass(frozen=True)
class Printed:
    """A kernel as MLX prints it."""

    name: str
    header: str  # before it: our functions
    constants: str  # its template's parameters, as constants
    parameters: str
    source: str

    def as_opencl(self) -> str:
        """Return a kernel in a namespace of its own, so that many with one header are one text."""
        kernel = f"__kernel void run_{self.name}({self.parameters}) {{\n{self.source}\n}}"
        return f"namespace {self.name} {{\n{self.constants}\n{kernel}\n}}\n"


@cache
def clang() -> tuple[str, ...] | None:
    """Return the command of a clang: Linux's own, or the one in PyPI's ziglang."""
    if sys.platform == "linux" and (found := shutil.which("clang")):
        return (found,)
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "clang")
    return None


def need_clang() -> None:
    """Leave a test out where there is no clang; in CI, fail."""
    if clang() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "no clang to check Metal's address spaces: `apt install clang`, or `pip install ziglang` in .venv"
        )


@contextmanager
def printing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every kernel print its text when it is traced, and nothing be computed."""
    make: Any = mx.fast.metal_kernel

    def verbose(**given: Any) -> Callable[..., list[mx.array]]:
        kernel = make(**given)
        return lambda **inputs: kernel(**inputs, verbose=True)

    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", verbose)
        patch.setattr(KV, "launch", lambda self: None)
        yield


def printed(trace: Callable[[], object]) -> list[Printed]:
    """Return the kernels that a function calls. Nothing is computed."""

    def traced(x: mx.array) -> mx.array:
        trace()
        return x  # what is exported

    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as said, tempfile.NamedTemporaryFile(suffix=".mlxfn") as exported:
        stdout = os.dup(1)
        os.dup2(said.fileno(), 1)  # MLX prints from C++
        try:
            mx.export_function(exported.name, traced, mx.zeros(1))
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        said.seek(0)
        found = re.findall(r"Generated source code for `[^`]*`:\n```\n(.*?)\n```\n", said.read(), re.DOTALL)
    return list(map(_parse, found))


def _parse(text: str) -> Printed:
    matched = re.fullmatch(
        r"(.*?)(?:template <([^\n]*)>\n)?\[\[kernel\]\] void (\w+)\((.*?)\) \{\n(.*)\n\}\n(.*)", text, re.DOTALL
    )
    assert matched, text
    header, template, name, parameters, source, instance = matched.groups()
    constants = []
    if template:
        values = re.search(rf"decltype\({name}<(.*?)>\)", instance)
        assert values
        for parameter, value in zip(template.split(", "), values[1].split(", "), strict=True):
            kind, key = parameter.split()
            constants.append(
                f"using {key} = {value};" if kind == "typename" else f"constant constexpr {kind} {key} = {value};"
            )
    parameters = re.sub(r"\[\[.*?\]\]", "", parameters)  # which buffer, which built-in value
    parameters = re.sub(r"const constant int& (\w+)", r"const int \1", parameters)  # OpenCL passes no references
    return Printed(name, header, "\n".join(constants), parameters, source)


def mistakes(kernels: Iterable[Printed]) -> str:
    """Return what clang and we complain about in kernels, all that share a header in one go."""
    by_header: dict[str, list[Printed]] = {}
    for kernel in dict.fromkeys(kernels):
        by_header.setdefault(kernel.header, []).append(kernel)
    said = []
    for header, together in by_header.items():
        said += complaints(header) + [each for kernel in together for each in complaints(kernel.source)]
        text = "".join(
            [HEADER, re.sub(r"#include <[mM]etal.*>", "", header), *(kernel.as_opencl() for kernel in together)]
        )
        command = clang()
        assert command is not None
        said.append(subprocess.run([*command, *FLAGS, "-"], input=text, text=True, capture_output=True).stderr)
    return "\n".join(each for each in said if each)


def complaints(text: str) -> list[str]:
    """Return where a text names no address space though Metal wants one, and OpenCL takes a thread's: references, and
    the objects of methods."""
    text = re.sub(r"//.*", "", text)
    found = [
        f"a reference without an address space: {each.strip()}"
        for each in re.findall(r"[^\n(,;{}]*(?:[\w>]&\s?\w|\w &\w|\(&\w+\)\s*\[)[^\n,;]*", text)
        if not re.search(SPACE, each)
    ]
    for struct in re.finditer(r"\bstruct\s+(\w+)[^;{]*\{", text):
        found += [
            f"a method without an address space: {struct[1]}: {each}" for each in _methods(text[struct.end() :])
        ]
    return found


def _methods(body: str) -> Iterator[str]:
    """Yield the head of each method that says no address space for its object, from the body of a struct on."""
    depth, begun = 1, 0
    for at, letter in enumerate(body):
        if letter == "{":
            head = body[begun:at]
            after = head.rpartition(")")[2]
            method = depth == 1 and "(" in head and "=" not in after and not re.search(r"\bstatic\b", head)
            if method and not re.search(SPACE, after):
                yield " ".join(head.split())
            depth += 1
        elif letter == "}":
            depth -= 1
            begun = at + 1
            if not depth:
                return
        elif letter == ";" and depth == 1:
            begun = at + 1
