"""Kills that land while weights are written, weights that are no numbers, machines without HOME, TMPDIR or g++."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

from checkpoints import save, write
from disks import read_only_folder
from fixtures import collect, submit
from headstart.checkpoint import load_model, read_layout
from headstart.cli.main import app
from headstart.engine import Engine
from headstart.kernels.cpu import compiler

# Runs a command, stops for good in the middle of the nth write of weights, and says so.
STOPS = """
import signal, sys
from headstart.checkpoint import safetensors
real, left = safetensors.append_array, int(sys.argv.pop(1))
def append(file, array):
    global left
    left -= 1
    if left:
        return real(file, array)
    real(file, array.reshape(-1)[: array.size // 2])
    file.flush()
    print("stopped", flush=True)
    signal.pause()
safetensors.append_array = append
from headstart.cli.main import app
app()
"""


def killed_while_writing(nth: int, *command: str | Path) -> None:
    arguments = [sys.executable, "-c", STOPS, str(nth), *map(str, command)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert any(line == "stopped\n" for line in process.stdout), "it ended before that write"
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def run(*command: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in command])


@pytest.mark.parametrize("nth", [pytest.param(1, marks=pytest.mark.slow), 30])
def test_a_conversion_killed_while_it_writes_leaves_nothing_that_looks_finished(tmp_path: Path, nth: int) -> None:
    raw, out = write(tmp_path / "raw"), tmp_path / "out"
    killed_while_writing(nth, "convert", raw, out)
    (partial,) = tmp_path.glob(".out*")
    assert [file.name for file in partial.rglob("*.safetensors")], "it was writing"
    assert not out.exists()
    assert not (partial / "config.json").exists(), "nothing takes it for a model"
    assert run("inspect", partial).exit_code == 1
    assert run("convert", raw, out).exit_code == 0
    assert read_layout(out).mtp.available
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"], "what the dead left is gone"


@pytest.mark.slow
def test_a_graft_killed_while_it_writes_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    raw, model = write(tmp_path / "raw"), write(tmp_path / "model", "dense", "stripped")
    before = {file.name: file.read_bytes() for file in model.iterdir()}
    killed_while_writing(5, "graft", model, "--from", raw)
    assert {file.name: file.read_bytes() for file in model.iterdir() if file.is_file()} == before
    assert not read_layout(model).mtp.available
    assert run("graft", model, "--from", raw).exit_code == 0
    assert read_layout(model).mtp.available
    assert not [path for path in model.rglob("*") if ".headstart-" in path.name]


@pytest.mark.parametrize("place", ["out", "deep/er/out"])
def test_a_destination_that_cannot_be_written_is_one_line(tmp_path: Path, place: str) -> None:
    raw = write(tmp_path / "raw")
    with read_only_folder(tmp_path / "sealed") as sealed:
        result = run("convert", raw, sealed / place)
    assert result.exit_code == 1
    assert "sealed cannot be written to" in result.stderr
    assert "Traceback" not in result.stderr


def with_weights(folder: Path, change: Any) -> Path:
    (file,) = write(folder, shards=1, vocab_size=8192).glob("model-*.safetensors")
    arrays: Any = mx.load(str(file))
    change(arrays)
    save(file, arrays, {"format": "pt"})
    return folder


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1"], ["--temperature", "1", "--seed", "3"]])
def test_a_model_of_nans_ends_its_request_with_an_error(tmp_path: Path, sampling: list[str]) -> None:
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    folder = with_weights(tmp_path / "model", lambda a: a.update({name: a[name] * float("nan")}))
    result = run("generate", "-m", folder, "-p", "x", *sampling)
    assert result.exit_code == 1
    assert "error: the model's logits are not finite" in result.stderr


def test_a_model_of_nans_leaves_the_engine_alive(tmp_path: Path) -> None:
    name = "model.language_model.norm.weight"
    engine = Engine(load_model(with_weights(tmp_path, lambda a: a.update({name: a[name] * float("nan")}))))
    engine.warm_up()
    for _ in range(2):
        answer = collect(submit(engine, [5, 17, 130], max_tokens=8))
        assert (answer.finish_reason, answer.tokens) == ("error", [])
        assert "not finite" in str(answer.error)


def test_empty_and_scalar_tensors_of_the_vision_part_are_converted(tmp_path: Path) -> None:
    odd = {f"model.visual.{n}": mx.zeros(shape) for n, shape in {"a": (0, 3), "b": (3, 0), "c": ()}.items()}
    folder = with_weights(tmp_path / "model", lambda a: a.update(odd))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(odd, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    result = run("convert", folder, tmp_path / "out")
    assert result.exit_code == 0, result.output
    written: Any = mx.load(str(tmp_path / "out/model.safetensors"))
    assert [written[f"vision_tower.{n}"].shape for n in "abc"] == [(0, 3), (3, 0), ()]


# -- what the machine lacks


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether compiling is still on after `ensure_compiles`, which decides once for a process."""
    on = [True]
    monkeypatch.setattr(compiler.mx, "disable_compile", lambda: on.append(False))
    compiler.ensure_compiles.cache_clear()
    return on


def test_a_tmpdir_that_is_not_there_is_passed_over(monkeypatch: pytest.MonkeyPatch, compiled: list[bool]) -> None:
    monkeypatch.setenv("TMPDIR", "/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", None)
    compiler.ensure_compiles()
    assert Path(os.environ["TMPDIR"]).is_dir()
    assert compiled == [True]


@pytest.mark.parametrize("lacks", ["g++", "directory", "room"])
def test_what_cannot_be_compiled_is_run_without(
    monkeypatch: pytest.MonkeyPatch, compiled: list[bool], caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    def fails(*_: object) -> None:
        raise FileNotFoundError if lacks == "directory" else RuntimeError("cannot create directories")

    if lacks == "g++":
        monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    elif lacks == "directory":
        monkeypatch.setattr(tempfile, "gettempdir", fails)
    else:
        monkeypatch.setattr(compiler, "swiglu", fails)
    compiler.ensure_compiles()
    assert compiled[-1] is False
    words = {"g++": "no g++", "directory": "set TMPDIR to one", "room": "cannot create directories"}
    assert words[lacks] in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"HOME": "/nonexistent"}, {"HOME": ""}, {"TMPDIR": "/nonexistent"}, {"PATH": "/nonexistent"}]
)
def test_commands_need_no_home_no_tmpdir_and_no_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    raw = write(tmp_path / "raw")
    for command in (
        ["list"],
        ["inspect", raw],
        ["convert", raw, tmp_path / "out"],
        ["generate", "-p", "x", "--max-tokens", "4"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "headstart", *map(str, command)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
