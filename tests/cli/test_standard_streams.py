"""Standard streams that are closed or cannot be written to, as of services and full disks."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.cli.main import app

HEADSTART = str(Path(sysconfig.get_path("scripts")) / "headstart")
GENERATE = "generate -p hi -n 3 --k 0"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", f"{HEADSTART} {command}"], capture_output=True, text=True)


def test_a_model_is_read_where_standard_streams_are_closed() -> None:
    """Its files would be number 0, which MLX takes for a failure."""
    text = CliRunner().invoke(app, GENERATE.split()).stdout
    result = shell(f"{GENERATE} <&- 2>&-")
    assert (result.returncode, result.stdout) == (0, text), result.stderr
    result = shell(f"{GENERATE} <&- >&-")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "3 tokens" in result.stderr


def test_a_program_may_close_them_before_it_loads_a_model() -> None:
    program = (
        "import os, headstart\nfor number in (0, 1):\n    os.close(number)\n"
        "model, _ = headstart.load('tiny-qwen3.5')\nos.write(2, b'loaded')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "loaded")


def test_a_closed_input_ends_a_chat() -> None:
    result = shell("chat <&-")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


@needs_full
@pytest.mark.parametrize("command", ["list", "--help"])
def test_a_full_disk_is_one_line(command: str) -> None:
    result = shell(f"{command} >/dev/full")
    assert (result.returncode, result.stderr) == (
        1,
        "error: the output could not be written: No space left on device\n",
    )


@needs_full
def test_nothing_more_can_be_said_where_that_cannot_be_written_either() -> None:
    assert shell("list >/dev/full 2>/dev/full").returncode == 1
