"""`headstart`: what holds for all commands."""

import os
import subprocess
import sysconfig
from pathlib import Path


def test_an_mlx_without_its_backend_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    """As on Linux, where mlx alone lacks libmlx.so."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.so").touch()
    command = [Path(sysconfig.get_path("scripts")) / "headstart", "inspect", "tiny-qwen3.5"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: mlx cannot be loaded (")
    assert "pip install 'mlx[cpu]'" in line
