"""The CPU kernels are compiled once, safely, and any failure leaves stock ops and one line with the reason."""

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from headstart.checkpoint import read_layout, resolve
from headstart.errors import HeadstartError
from headstart.host import available_cores
from headstart.kernels import Backend, choose_backend
from headstart.kernels.cpu import build, load
from headstart.kernels.setting import VARIABLE

LOAD = "from headstart.kernels.cpu.load import loaded; print(loaded())"


def run(code: str, **environment: str) -> subprocess.Popen[str]:
    """A fresh process, with no more of the environment than it needs."""
    given = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**given, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """What it prints, and its lines on the standard error stream."""
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out.strip(), err.splitlines()


@pytest.fixture
def load_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Load the kernels in this process, as if for the first time, and return what computes."""

    def loaded(**environment: str) -> str:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(load, "_loaded", None)
        return str(load.loaded())

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return loaded


def stub(folder: Path, text: str) -> Path:
    """A compiler that is a shell script."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_compiler(tmp_path: Path, load_with: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    said = load_with(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert said.startswith("stock (no C++ compiler found")
    line = caplog.messages[-1]
    assert "several times slower" in line
    assert "install g++" in line
    assert not list(tmp_path.rglob("build-*"))


def test_no_compiler_is_no_matter_where_a_gpu_computes(
    tmp_path: Path, load_with: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "_loaded", None)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.gpu)
        assert isinstance(choose_backend(), Backend)
    assert load._loaded is None
    assert "several times slower" not in caplog.text
    load_with(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert "several times slower" in caplog.text


def test_a_broken_compiler(tmp_path: Path, load_with: Callable[..., str]) -> None:
    compiler = stub(tmp_path, "echo 'error: cannot find the end of the world' >&2; exit 3")
    said = load_with(CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert said == "stock (c++ failed with status 3: error: cannot find the end of the world)"
    assert not list(tmp_path.rglob("*.so")), "nothing half built is left"
    assert not list(tmp_path.rglob("build-*"))


def test_a_compiler_that_makes_rubbish(tmp_path: Path, load_with: Callable[..., str]) -> None:
    """It exits with success; what it made is tried in a process of its own and never gets its name."""
    compiler = stub(tmp_path, 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo rubbish > "$2"; shift; done')
    said = load_with(CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert said.startswith("stock (python"), said
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_home(tmp_path: Path, load_with: Callable[..., str]) -> None:
    tmp_path.chmod(0o500)
    assert "XDG_CACHE_HOME" in load_with(HOME=str(tmp_path))


def test_a_home_that_cannot_be_written(tmp_path: Path, load_with: Callable[..., str]) -> None:
    (tmp_path / "file").write_text("")
    said = load_with(HOME=str(tmp_path / "file"))  # nobody can make a folder in a file, not even root
    assert said.startswith("stock (")
    assert "XDG_CACHE_HOME" in said


def test_a_folder_that_others_may_write(tmp_path: Path, load_with: Callable[..., str]) -> None:
    folder = tmp_path / "headstart" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert f"chmod 700 {folder}" in load_with(XDG_CACHE_HOME=str(tmp_path))


def test_another_nanobind(tmp_path: Path, load_with: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.nanobind, "source_dir", lambda: str(tmp_path))
    (tmp_path / "nb_internals.h").write_text("#define NB_INTERNALS_VERSION 7\n")
    assert "was built with another nanobind" in load_with(XDG_CACHE_HOME=str(tmp_path))


def test_stock_ops_can_be_forced(load_with: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    assert load_with(HEADSTART_KERNELS="stock") == "stock (HEADSTART_KERNELS=stock)"
    assert not caplog.records, "no warning: the user asked for it"


def test_an_unknown_choice_is_refused(load_with: Callable[..., str]) -> None:
    with pytest.raises(HeadstartError, match=r"^HEADSTART_KERNELS is 'fast'; set it to 'auto' or 'stock'"):
        load_with(HEADSTART_KERNELS="fast")
    with pytest.raises(HeadstartError, match=r"^HEADSTART_KERNELS is"):
        read_layout(resolve())  # no fault of its config.json


def counting(folder: Path) -> Path:
    """The system's compiler, which writes a line for every call."""
    return stub(folder, f'echo call >> {folder}/calls; exec {build.compiler()} -O0 "$@"')


@pytest.mark.slow
def test_two_processes_at_once_build_once_and_both_run(tmp_path: Path) -> None:
    compiler = counting(tmp_path)
    both = [run(LOAD, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert all(told(process)[0].startswith("native (") for process in both)
    assert (tmp_path / "calls").read_text().count("call") == 4, "three objects and a link"
    folder = tmp_path / "headstart" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.glob("*.so"))) == 1
    said, warned = told(run(LOAD, PATH=str(tmp_path / "none"), XDG_CACHE_HOME=str(tmp_path)))
    assert said.startswith("native ("), "a later process needs no compiler"
    assert not warned


def test_a_cancelled_build_is_no_harm(tmp_path: Path, load_with: Callable[..., str]) -> None:
    compiler = stub(tmp_path, f"touch {tmp_path}/begun; exec sleep 20")
    process = run(LOAD, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    process.kill()
    process.communicate()
    folder = tmp_path / "headstart" / "kernels"
    assert list(folder.glob("build-*")), "what a killed process leaves"
    said = load_with(CXX=str(stub(tmp_path, "exit 1")), XDG_CACHE_HOME=str(tmp_path))
    assert said.startswith("stock (c++ failed"), "its lock went with it"
    assert not list(folder.glob("build-*"))
    assert not list(folder.glob("*.so"))


def test_the_key_changes_with_what_a_build_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build.key(["-march=native"]), build.key(["-march=haswell"])}
    for name, value in [("_cpu", lambda: "another"), ("HERE", Path(__file__).parent)]:
        with monkeypatch.context() as patched:
            patched.setattr(build, name, value)
            keys.add(build.key(["-march=native"]))
    with monkeypatch.context() as patched:
        patched.setattr(sysconfig, "get_config_var", lambda name: ".another.so")
        keys.add(build.key(["-march=native"]))
    assert len(keys) == 5
    assert build.key(["-march=native"]) in keys


@pytest.mark.parametrize(
    ("quota", "most"),
    [("100000 100000", 1), ("50000 100000", 1), ("150000 100000", 2), ("max 100000", None), ("", None)],
)
def test_a_container_has_no_more_cores_than_it_has_time_for(tmp_path: Path, quota: str, most: int | None) -> None:
    seen = available_cores(tmp_path / "nothing")
    (tmp_path / "cpu.max").write_text(quota)
    assert available_cores(tmp_path / "cpu.max") == min(seen, most or seen)
