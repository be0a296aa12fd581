"""A Mac, as far as Linux can play one: every module is imported, and a model loaded and run. See `darwin.py`."""

import os
import subprocess
import sys
from pathlib import Path

DARWIN = Path(__file__).with_name("darwin.py")


def test_on_a_mac_every_module_is_imported_and_a_model_runs(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "80"}
    done = subprocess.run([sys.executable, str(DARWIN)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" = ", 1) for line in done.stdout.splitlines() if " = " in line)
    ours = [path for path in (DARWIN.parents[1] / "src" / "headstart").rglob("*.py") if path.name != "__init__.py"]
    assert int(said["modules"]) > len(ours)
    assert (said["processor"], said["system"]) == ("Apple M1", "macOS 15.5 arm64")
    assert said["recommended for a GPU"] == "11.6 GiB"
    assert said["backend"].startswith("MetalBackend float16")  # an M1 has no bfloat16
    assert said["tokens"] == "4"
    assert "--max-connections" in done.stdout, "serve --help"
    kept = tmp_path / "Library" / "Caches" / "headstart" / "kernels" / "metal.json"
    assert '"Apple M1, macOS 15.5, ' in kept.read_text()
