"""The CPU kernels without MLX around them: on ARM, and in the child of a fork."""

import shutil
import subprocess
from pathlib import Path

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


def test_the_child_of_a_fork_computes_without_workers(tmp_path: Path) -> None:
    program = compiled(tmp_path / "fork_pool", build.compiler(), str(FOLDER / "fork_pool.cpp"))
    for _ in range(5):
        subprocess.run([str(program)], check=True, timeout=600)
