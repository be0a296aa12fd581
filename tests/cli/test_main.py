"""`headstart`: what holds for all commands."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headstart.cli.main import app


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


def test_a_removed_working_directory_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    command = [str(Path(sysconfig.get_path("scripts")) / "headstart"), "generate", "-p", "Hello", "-n", "1"]
    for each in (command, [*command, "--model", "."]):
        gone.mkdir()
        script = 'cd "$0" && rmdir "$0" && exec "$@"'
        result = subprocess.run(["bash", "-c", script, str(gone), *each], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == "error: the folder that this terminal is in was removed: change to another\n"


def test_help_has_a_short_name() -> None:
    for command in ([], ["generate"]):
        assert "Usage:" in CliRunner().invoke(app, [*command, "-h"]).stdout


COMMANDS = [
    "demo",
    "generate",
    "chat",
    "serve",
    "launch",
    "recommend",
    "config",
    "list",
    "pull",
    "ps",
    "stop",
    "remove",
    "inspect",
    "convert",
    "graft",
    "probe",
    "bench",
]
WITH_MODEL = ["demo", "generate", "chat", "serve", "inspect", "probe", "bench"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_no_type_on_switches_and_no_broken_words(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "<bool>" not in shown
    assert "╭" not in shown
    assert "--help" in shown
    assert command in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.parametrize(("name", "ours"), [("run", "chat"), ("show", "inspect"), ("rm", "remove"), ("ls", "list")])
def test_ollamas_names_work(name: str, ours: str) -> None:
    shown, expected = [CliRunner().invoke(app, [each, "--help"]).stdout.splitlines() for each in (name, ours)]
    assert shown[1:] == expected[1:]
    assert len(shown) > 3
    assert CliRunner().invoke(app, ["help", name]).stdout.splitlines() == shown


@pytest.mark.parametrize("command", WITH_MODEL)
@pytest.mark.parametrize("flag", [[], ["-m"]])
def test_an_empty_name_is_no_name_for_the_builtin_model(command: str, flag: list[str]) -> None:
    """As a script has it whose variable is not set."""
    prompt = ["-p", "Hello"] if command == "generate" else []
    result = CliRunner().invoke(app, [command, *flag, "", *prompt])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the model's name is empty")


@pytest.mark.parametrize("command", WITH_MODEL)
@pytest.mark.parametrize("flag", [[], ["-m"], ["--model"]])
def test_every_command_takes_the_model_as_an_argument_and_as_an_option(command: str, flag: list[str]) -> None:
    prompt = ["-p", "Hello"] if command == "generate" else []
    port = ["--port", "0"] if command == "serve" else []
    result = CliRunner().invoke(app, [command, *flag, "no-such-model", *prompt, *port])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: no-such-model: no such folder, no model of that name")


@pytest.mark.parametrize("command", [each for each in WITH_MODEL if each not in ("generate", "chat")])
def test_a_model_is_named_once(command: str) -> None:
    result = CliRunner().invoke(app, [command, "one", "-m", "two"])
    assert (result.exit_code, result.stderr) == (1, "error: MODEL is one, and --model is two: name it once\n")
