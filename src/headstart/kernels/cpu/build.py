"""Compile the CPU kernels with the system's compiler, once for each version of everything that they depend on."""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import nanobind

from ...errors import HeadstartError
from ..cache import cache_folder, refuse_shared

HERE = Path(__file__).parent
MODULE = "headstart_cpu"  # as extension.cpp names it
LOG = logging.getLogger("headstart")
LONGEST = 1800  # seconds that the compiler may take on a busy machine
COMMON = ("-std=c++20", "-fPIC", "-pthread", "-w", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
CHECK = "import sys; from headstart.kernels.cpu.load import check_build; check_build(sys.argv[1])"


class BuildError(HeadstartError):
    """The kernels could not be compiled here."""


def extension(flags: Sequence[str] | None = None) -> Path:
    """Return the extension, compiled now if this is its first use. `flags` are for another CPU than this one."""
    flags = target() if flags is None else list(flags)
    folder = cache_folder()
    path = folder / f"{MODULE}-{key(flags)}.so"
    try:
        if not path.is_file():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_shared(folder)
        if not path.is_file():
            with _locked(folder):
                if not path.is_file():  # or another process has just built it
                    LOG.warning("Compiling CPU kernels for this machine, once; this takes about half a minute")
                    _build(path, flags)
    except OSError as error:
        raise BuildError(
            f"{folder} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder of yours"
        ) from None
    return path


def key(flags: Sequence[str]) -> str:
    """Everything that a build depends on, hashed."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(path.read_bytes())
    library = _mlx() / "lib"
    size = sum(path.stat().st_size for path in library.glob("libmlx.*"))  # wheels for several devices share a version
    python = sysconfig.get_config_var("EXT_SUFFIX") or sys.implementation.cache_tag
    digest.update(repr((version("mlx"), size, nanobind.__version__, python, _cpu(), *COMMON, *flags)).encode())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """Return the processor, as far as compilers tell them apart."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() + platform.machine()
    found = re.findall(r"^(?:flags|Features|model name|CPU part)\s*:.*$", text, re.MULTILINE)
    return "\n".join(sorted(set(found))) + platform.machine()


def _mlx() -> Path:
    return Path(mx.__file__).parent


def compiler() -> str:
    """Return the C++ compiler: CXX if it is set, else the system's."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(f"no C++ compiler found ({', '.join(names)}); install g++ 11 or newer, or clang 14 or newer")
    return found


def target() -> list[str]:
    """Compiler flags for this CPU. Compilers use half of AVX-512's registers unless told to."""
    if platform.machine() in ("arm64", "aarch64"):
        return ["-mcpu=native"]
    return ["-march=native", *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else [])]


def kernel_flags(flags: Sequence[str]) -> list[str]:
    """Compiler flags for the kernels, which use MLX's exponential function and nothing else of it."""
    return [f"-I{_mlx() / 'include'}", "-O3", *flags]


def _check_nanobind() -> None:
    """Refuse a nanobind whose types mlx's module would not recognise."""
    internals = Path(nanobind.source_dir(), "nb_internals.h").read_text()
    found = re.search(r"define NB_INTERNALS_VERSION (\d+)", internals)
    number = found[1].encode() if found else b"?"
    if not re.search(rb"nanobind\w*_v" + number + rb"\b", Path(mx.__file__).read_bytes()):
        raise BuildError(
            f"mlx {version('mlx')} was built with another nanobind than the installed {nanobind.__version__}; "
            "install the nanobind release that was current when this mlx was published"
        )


def _build(path: Path, flags: Sequence[str]) -> None:
    """Compile, try it in a process of its own, and only then give it its name."""
    _check_nanobind()
    source = Path(nanobind.source_dir())
    robin_map = source.parent / "ext" / "robin_map" / "include"
    include = [nanobind.include_dir(), robin_map, _mlx() / "include", sysconfig.get_path("include")]
    glue = ["-O2", "-DNB_DOMAIN=mlx", *(f"-I{folder}" for folder in include)]
    files = {
        source / "nb_combined.cpp": glue,
        HERE / "extension.cpp": glue,
        HERE / "kernels.cpp": kernel_flags(flags),
    }
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as scratch, ThreadPoolExecutor() as pool:
        objects = [f"{scratch}/{file.stem}.o" for file in files]
        commands = [
            [compiler(), *COMMON, *options, "-c", str(file), "-o", made]
            for (file, options), made in zip(files.items(), objects, strict=True)
        ]
        list(pool.map(_run, commands))
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        made = Path(scratch, path.name)
        _run([compiler(), *shared, "-pthread", *objects, f"-L{_mlx() / 'lib'}", "-lmlx", "-o", str(made)])
        _run([sys.executable, "-c", CHECK, str(made)])
        os.replace(made, path)


def _run(command: list[str]) -> None:
    """Run a command, and report how it fails by the first line of its output that names an error."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
            timeout=LONGEST, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler took more than {LONGEST} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()] or ["no message"]
        told = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise BuildError(f"{Path(command[0]).name} failed with status {done.returncode}: {told[:300]}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process build at a time, and clear away what cancelled builds left. The system ends the lock of
    a process that dies. Where a file system has no locks, two may build; the second replaces the first."""
    with (folder / "lock").open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob("build-*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
