"""The CPU kernels without MLX around them: for other CPUs, on ARM, and in the child of a fork."""

import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import nanobind
import pytest

from headstart.kernels.cpu import build

FOLDER = Path(__file__).parent
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def compiled(program: Path, compiler: str, *arguments: str) -> Path:
    command = [compiler, *build.COMMON, "-O2", f"-I{build.HERE}", *arguments, "-o", str(program)]
    subprocess.run(command, check=True, timeout=build.LONGEST)
    return program


def printed(*command: str) -> tuple[str, str]:
    """Which instructions a build uses, and the hashes of what it computes."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=build.LONGEST)
    return done.stderr.strip(), done.stdout


def test_lanes_have_the_same_bits_on_every_cpu(tmp_path: Path) -> None:
    flags = {"here": build.target(), "portable": ["-DHEADSTART_PORTABLE"]}
    if platform.machine() == "x86_64":
        flags["avx2"] = ["-march=haswell"]
    found = {}
    for name, given in flags.items():
        options = [*build.kernel_flags(given), str(FOLDER / "print_lanes.cpp")]
        isa, found[name] = printed(str(compiled(tmp_path / name, build.compiler(), *options)))
        assert isa == name or name == "here"
    assert len(set(found.values())) == 1
    assert len(found["here"].splitlines()) == 65


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which(CROSS) or not shutil.which(EMULATOR), reason="no cross compiler or emulator")
def test_neon_computes_the_bits_of_this_cpu(tmp_path: Path) -> None:
    sources = [str(FOLDER / "print_bits.cpp"), str(build.HERE / "kernels.cpp")]
    here = compiled(tmp_path / "here", build.compiler(), *build.kernel_flags(build.target()), *sources)
    neon = compiled(tmp_path / "neon", CROSS, *build.kernel_flags(["-static"]), *sources)
    _, expected = printed(str(here))
    isa, found = printed(EMULATOR, str(neon))
    assert isa == "neon"
    assert found.splitlines() == expected.splitlines()
    assert len(expected.splitlines()) > 50


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ziglang"), reason="no compiler for Macs: `pip install ziglang` in .venv")
@pytest.mark.parametrize("chip", ["apple_m1", "apple_m4"])
def test_kernels_compile_for_a_mac(chip: str, tmp_path: Path) -> None:
    """With the headers of macOS that zig carries. Only a Mac can link them with MLX, and run them."""
    source = Path(nanobind.source_dir())
    folders = nanobind.include_dir(), source.parent / "ext" / "robin_map" / "include", sysconfig.get_path("include")
    glue = [*build.kernel_flags(["-DNB_DOMAIN=mlx"]), *(f"-I{folder}" for folder in folders)]
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos", f"-mcpu={chip}", *build.COMMON]
    for name, flags in (("kernels", build.kernel_flags([])), ("extension", glue)):
        made = tmp_path / f"{name}.o"
        command = [*zig, *flags, "-c", str(build.HERE / f"{name}.cpp"), "-o", str(made)]
        subprocess.run(command, check=True, timeout=build.LONGEST)
        assert made.read_bytes()[:8] == bytes.fromhex("cffaedfe0c000001")  # Mach-O, 64 bits, arm64


def test_the_child_of_a_fork_computes_without_workers(tmp_path: Path) -> None:
    program = compiled(tmp_path / "fork_pool", build.compiler(), str(FOLDER / "fork_pool.cpp"))
    for _ in range(5):
        subprocess.run([str(program)], check=True, timeout=600)
