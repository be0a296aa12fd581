"""mlx-lm changes the limit on open files when it is imported; with a low one every command died of that."""

import resource
import subprocess
import sys

import pytest

from headstart import open_files


def limited(soft: int, hard: int, program: str) -> str:
    """Run a program in a process that may have so many files open, and return what it prints."""
    before = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
    after = "\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    command = [sys.executable, "-c", before + program + after]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def test_a_command_works_with_few_descriptors() -> None:
    command = "from headstart.cli.main import app\napp(['inspect', 'tiny-qwen3.5'], standalone_mode=False)"
    program = f"function = resource.setrlimit\n{command}\nassert resource.setrlimit is function"
    assert limited(128, 256, program) == "256 256"


@pytest.mark.slow  # the package sees to it, and a command imports it as they do
@pytest.mark.parametrize("entry", ["import headstart.kernels.recurrent", "from headstart import generate"])
def test_every_way_into_the_library_keeps_the_hard_limit(entry: str) -> None:
    program = f"function = resource.setrlimit\n{entry}\nassert resource.setrlimit is function"
    assert limited(1024, 3000, program) == "2048 3000"


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "expected"),
    [
        (1024, 524288, 524288, 65536),
        (1024, 4096, 4096, 4096),
        (256, resource.RLIM_INFINITY, 20000, 16384),  # macOS
        (100_000, 524288, 524288, 100_000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 0, 65536),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, allowed: int, expected: int
) -> None:
    def setrlimit(_: int, limits: tuple[int, int]) -> None:
        if limits[0] > allowed:
            raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert open_files.raise_limit(65536) == expected
