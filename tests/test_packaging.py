"""What an installed Headstart promises before any model runs."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections import defaultdict
from collections.abc import Callable
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
PACKAGE = Path(str(resources.files("headstart")))
BUILTIN = ("tiny-qwen3.5", "tiny-qwen3.5-moe")


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_version_is_that_of_the_package() -> None:
    assert run(Path(sysconfig.get_path("scripts")) / "headstart", "--version") == (
        f"headstart {version('headstart')}\n"
    )


def test_it_runs_as_a_module() -> None:
    assert run(sys.executable, "-m", "headstart", "--version") == f"headstart {version('headstart')}\n"


def test_help_tells_what_it_is() -> None:
    assert "multi-token-prediction" in run(Path(sysconfig.get_path("scripts")) / "headstart", "--help")


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy(flag: str) -> None:
    program = (
        "import sys, atexit\n"
        "heavy = ('mlx', 'mlx_lm', 'transformers', 'tokenizers', 'huggingface_hub', 'numpy')\n"
        "atexit.register(lambda: print('LOADED', *(m for m in heavy if m in sys.modules)))\n"
        "from headstart.cli.main import app\n"
        "app([sys.argv[1]])\n"
    )
    assert run(sys.executable, "-c", program, flag).splitlines()[-1] == "LOADED"


@pytest.mark.parametrize("name", BUILTIN)
def test_a_builtin_model_is_whole(name: str) -> None:
    folder = PACKAGE / "builtin" / name
    for required in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert json.loads((folder / required).read_text(encoding="utf-8")), required
    assert (folder / "chat_template.jinja").stat().st_size > 0

    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(tensor.startswith("mtp.") for tensor in weight_map)
    assert {path.name for path in folder.glob("*.safetensors")} == set(weight_map.values())
    for shard in set(weight_map.values()):
        # A truncated file, or a pointer in its place, does not have the length its header promises.
        with (folder / shard).open("rb") as file:
            header_length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_length))
        header.pop("__metadata__", None)
        data_length = max(tensor["data_offsets"][1] for tensor in header.values())
        assert (folder / shard).stat().st_size == 8 + header_length + data_length
        assert set(header) == {tensor for tensor, home in weight_map.items() if home == shard}


def listed(_: Path) -> set[str]:
    return {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}


def built(folder: Path) -> set[str]:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("headstart/")}


@pytest.mark.parametrize("contents", [listed, pytest.param(built, marks=pytest.mark.slow)])
def test_the_wheel_carries_every_file_of_the_package(contents: Callable[[Path], set[str]], tmp_path: Path) -> None:
    packed = contents(tmp_path)
    source = {
        f"headstart/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == source
    assert {f"headstart/builtin/{name}/TRAINING.md" for name in BUILTIN} <= packed


def test_a_public_name_is_defined_once() -> None:
    """One name, one meaning: no module-level class or function of the package shares its name with another."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "src/headstart").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_no_file_is_longer_than_350_lines() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "src/headstart").rglob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > 350}


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """They import each other by name, and a child process would find the wrong one."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "conftest.py"]
    assert len(names) == len(set(names))


def test_the_last_lines_of_the_tests_say_what_was_left_out_without_a_browser(tmp_path: Path) -> None:
    """With the one command that brings it. The tests of the page's settings stand for all that need a browser."""
    file = "tests/server/dashboard/test_dashboard_settings.py"
    left_out = (ROOT / file).read_text().count("visit: Visit")
    nowhere = {"PATH": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | nowhere
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    *_, line, _ = said.splitlines()
    assert line == (
        f"{left_out} tests of the dashboard were left out: no Chromium here: "
        "`.venv/bin/playwright install --with-deps chromium` brings one"
    )
