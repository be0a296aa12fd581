"""Compile our kernels before MLX would, several at a time, and keep them between processes.

MLX compiles a custom kernel when it is first evaluated: one at a time, with headers that take it three seconds to
read, and anew in every process. But it first looks into its folder of compiled kernels. So a kernel is compiled when
it is first described, with the few headers that ours need, and put there under the name that MLX will look for. Where
any of that fails, MLX compiles it as always.
"""

import ctypes
import hashlib
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache import SharedFolderError, cache_folder, refuse_shared
from .device import device_attribute
from .stock import stock_kernels_compiled

LOG = logging.getLogger("headstart")
# Bytes of a kernel's output at least. MLX keeps arrays of up to 8 bytes in memory that is shared with the host, and
# gives any array a buffer of its size that the host has written or read before. From there a kernel reads over the
# bus, or waits for a page. Arrays that the host touches rarely have this size.
ROOM = 4096
CACHE_HINTS = "#define HEADSTART_CACHE_HINTS\n"  # for code that is checked after it is compiled, not for MLX's
KNOWN = "0.32."  # versions of MLX that name and declare kernels as below
TYPES = {  # in CUDA, and in the name of a kernel
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.float16: ("__half", "float16_t"),
    mx.float32: ("float", "float"),
    mx.int32: ("int32_t", "int32_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
    mx.bool_: ("bool", "bool"),
    mx.uint8: ("uint8_t", "uint8_t"),
}
# In place of MLX's headers, of which our kernels use these declarations alone.
HEADERS = {
    "cooperative_groups.h": "namespace cooperative_groups {}\n",
    "mlx/backend/cuda/device/utils.cuh": """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "mlx/backend/cuda/device/config.h"
typedef int int32_t;
typedef unsigned uint32_t;
typedef unsigned char uint8_t;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
namespace cuda::std {
template <typename A, typename B> constexpr bool is_same_v = false;
template <typename A> constexpr bool is_same_v<A, A> = true;
template <bool FIRST, typename A, typename B> struct conditional { using type = A; };
template <typename A, typename B> struct conditional<false, A, B> { using type = B; };
template <bool FIRST, typename A, typename B> using conditional_t = typename conditional<FIRST, A, B>::type;
}
namespace mlx::core::cu {
struct Shape {
  int32_t at[MAX_NDIM];
  constexpr int32_t operator[](int i) const { return at[i]; }
};
}
""",
}
_of_thread = threading.local()


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    shared_memory: int = 0,
    read_by_host: bool = False,
) -> Any:
    """Return what `mx.fast.cuda_kernel` does, and have each form of it compiled when it is first described.

    Args:
        read_by_host: Whether the host reads what it makes. If not, small outputs stay in the device's memory.
    """
    compiles = _compiles()
    header = f"// {_stamp()}\n{header}" if compiles else header
    kernel: Any = mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
        shared_memory=shared_memory,
    )
    forms = set()

    def launch(
        *, inputs: Sequence[mx.array], template: Any, output_shapes: Any, output_dtypes: Any, **rest: Any
    ) -> list[mx.array]:
        form = (*template, *[array.dtype for array in inputs], *output_dtypes)
        if compiles and form not in forms:
            forms.add(form)
            try:
                arguments = declare(input_names, inputs, output_names, output_dtypes, source)
                _compile_once(*kernel_text(name, header, arguments, template, source))
            except Exception as error:
                _warn(repr(error))
        pairs = list(zip(output_shapes, output_dtypes, strict=True))
        roomy = output_shapes if read_by_host else [_with_room(*pair) for pair in pairs]
        made = kernel(inputs=inputs, template=template, output_shapes=roomy, output_dtypes=output_dtypes, **rest)
        outputs = zip(made, roomy, output_shapes, strict=True)
        return [m if room == shape else m[: shape[0]] for m, room, shape in outputs]

    return launch


def _with_room(shape: Sequence[int], dtype: mx.Dtype) -> Sequence[int]:
    """Return the shape with as many of its first axis as fill the least room."""
    each = max(math.prod(shape[1:]) * dtype.size, 1)
    return (-(-ROOM // each), *shape[1:]) if shape[0] * each < ROOM else shape


def _compiles() -> bool:
    return bool(mx.cuda.is_available()) and version("mlx").startswith(KNOWN)


@contextmanager
def compiled_together(dtype: mx.Dtype) -> Iterator[None]:
    """Compile the kernels that are described within side by side, ready at its end, and those of MLX that a model of
    this type needs. Nothing is evaluated within."""
    stock = stock_kernels_compiled(dtype, compiled_folder()) if _compiles() else nullcontext()
    with stock, ThreadPoolExecutor() as pool:
        _of_thread.pool = pool
        try:
            yield
        finally:
            _of_thread.pool = None


def declare(
    input_names: Sequence[str],
    inputs: Sequence[mx.array],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    source: str,
) -> str:
    """Return a kernel's parameters as MLX writes them: it gives those shapes that the source names."""
    declared = []
    for name, array in zip(input_names, inputs, strict=True):
        declared.append(f"    const {TYPES[array.dtype][0]}* {name}")
        if array.ndim:
            declared += [f"    const __grid_constant__ Shape {name}_shape"] * (f"{name}_shape" in source)
            declared += [f"    const __grid_constant__ int {name}_ndim"] * (f"{name}_ndim" in source)
    declared += [f"    {TYPES[dtype][0]}* {name}" for name, dtype in zip(output_names, output_dtypes, strict=True)]
    return ",\n".join(declared)


def kernel_text(
    name: str, header: str, arguments: str, template: Sequence[tuple[str, Any]], source: str
) -> tuple[str, str]:
    """Return the name and the text of a kernel as MLX puts them together, to the letter: both name its file."""
    constants = []
    for key, value in template:
        if isinstance(value, mx.Dtype):
            name += f"_{TYPES[value][1]}"
            constants.append(f"  using {key} = {TYPES[value][0]};\n")
        else:
            name += f"_{value}"
            constants.append(f"  constexpr int {key} = {value};\n")
    if constants:
        constants.append("\n")
    name = f"custom_kernel_{name}"
    text = (
        '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
        f"{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n__global__ void {name}(\n"
        f"{arguments}) {{\n{''.join(constants)}{source}\n}}\n\n}} // namespace mlx::core::cu\n"
    )
    return name, text


def _compile_once(name: str, text: str) -> None:
    path = compiled_folder() / f"{name}_{standard_hash(text.encode()):x}.ptx"
    if path.exists() and path.read_bytes().startswith(b"\x7fELF"):
        return
    if (pool := getattr(_of_thread, "pool", None)) is not None:
        pool.submit(_compile, path, name, text)
    else:
        _compile(path, name, text)


def _compile(path: Path, name: str, text: str) -> None:
    try:
        kernel = f"mlx::core::cu::{name}"
        code, symbol = compile_text(kernel, CACHE_HINTS + text)
        if has_uniform_copies(code):
            LOG.info("%s is compiled without cache hints", name)
            code, symbol = compile_text(kernel, text)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = f"mlx::core::cu::{name}\t{symbol}\n".encode()
        for target, content in ((path.with_suffix(".txt"), names), (path, code)):  # MLX looks for the code first
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(content)
            Path(file.name).chmod(0o644)
            Path(file.name).replace(target)
    except Exception as error:  # of the compiler, of the disk
        _warn(repr(error))


def has_uniform_copies(code: bytes) -> bool:
    """Return whether machine code may have copies to shared memory at a register plus a uniform register.

    Such a copy with a cache hint is miscompiled by NVRTC 13.0: it names uniform registers that hold neither, and the
    device reports an illegal instruction. Our copies are written so that there are none (`offset_address`).
    """
    instructions = memoryview(code)[: len(code) // 16 * 16].cast("Q")[::2].tolist()
    return any(word & 0xFFF == 0xDAE for word in instructions)


@cache
def _warn(reason: str) -> None:
    LOG.warning("CUDA kernels are left to MLX to compile, in every process anew: %s", reason[:300])


def keep_compiled_kernels() -> None:
    """Have MLX keep compiled kernels in a folder of the user: its own is in the temporary directory, is lost at a
    restart, and others may write to it. MLX reads the name of the folder once, when it first compiles."""
    if "MLX_PTX_CACHE_DIR" in os.environ:
        return
    try:
        folder = cache_folder() / f"mlx-{version('mlx')}-{_architecture()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_shared(folder)
    except (OSError, RuntimeError, SharedFolderError) as error:  # a user without a home is a RuntimeError
        LOG.warning("compiled CUDA kernels are kept in the temporary directory: %s", error)
    else:
        os.environ["MLX_PTX_CACHE_DIR"] = str(folder)


def compiled_folder() -> Path:
    """Return the folder where MLX looks for compiled kernels."""
    if folder := os.environ.get("MLX_PTX_CACHE_DIR"):
        return Path(folder)
    temporary = next(
        (os.environ[name] for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if name in os.environ), "/tmp"
    )
    return Path(temporary, "mlx", version("mlx"), "ptx")


def standard_hash(text: bytes) -> int:
    """Return `std::hash` of a string, with which MLX names files."""
    hash_bytes = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    hash_bytes.argtypes, hash_bytes.restype = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t], ctypes.c_size_t
    return int(hash_bytes(text, len(text), 0xC70F6907))


@cache
def _stamp() -> str:
    """Return what compiled code depends on beside a kernel's own text."""
    sources = [*sorted(Path(__file__).parent.glob("*.cu")), Path(__file__)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    return f"{digest} {_architecture()} nvrtc {_nvrtc_version()} mlx {version('mlx')}"


@cache
def _architecture() -> str:
    major, minor = device_attribute(75), device_attribute(76)
    return f"sm_{major}{minor}{'a' * (major >= 9)}"  # as MLX says it


@cache
def _nvrtc() -> ctypes.CDLL:
    """Return the compiler that MLX has loaded."""
    for release in (13, 12):
        with suppress(OSError):
            return ctypes.CDLL(f"libnvrtc.so.{release}")
    raise OSError("libnvrtc.so is not there")


def _nvrtc_version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    with suppress(OSError):
        _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_text(kernel: str, text: str) -> tuple[bytes, str]:
    """Return a kernel's machine code for this device, and its name there."""
    nvrtc, program, size, symbol = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()
    names, headers = (
        (ctypes.c_char_p * len(HEADERS))(*[e.encode() for e in each]) for each in zip(*HEADERS.items(), strict=True)
    )
    options = ["--device-as-default-execution-space", f"--gpu-architecture={_architecture()}"]
    options += [f"--include-path={folder}" for folder in include_folders()]
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])

    def call(function: str, *arguments: Any) -> None:
        if result := getattr(nvrtc, function)(*arguments):
            raise RuntimeError(f"{function} failed ({result})")

    call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", len(HEADERS), headers, names)
    try:
        call("nvrtcAddNameExpression", program, kernel.encode())
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded):
            call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call("nvrtcGetProgramLog", program, log)
            errors = [line for line in log.value.decode(errors="replace").splitlines() if "error" in line]
            raise RuntimeError("; ".join(errors[:3]) or "nvrtc failed")
        call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(symbol))
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, code)
        return code.raw, (symbol.value or b"").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def include_folders() -> list[Path]:
    """Return where MLX's and CUDA's headers are, as MLX looks for them."""
    package = Path(mx.__file__).parent
    wheels = [package.parent / "nvidia" / name / "include" for name in ("cu13", "cuda_runtime")]
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [*wheels, *[home / "include" for home in [*homes, Path("/usr/local/cuda")]]]
    return [package / "include", *[folder for folder in folders if (folder / "cuda_bf16.h").exists()][:1]]


if mx.cuda.is_available():
    keep_compiled_kernels()
