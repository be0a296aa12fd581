"""A rank that dies, stalls or goes its own way ends the others, with an error that names it. Nothing hangs."""

import signal
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import httpx
import pytest
from ranks import started

from checkpoints import write

SIZES = {"num_hidden_layers": 3, "full_attention_interval": 2}
PROMPT = [3, 1, 4, 1, 5]
HANG = 300.0  # seconds after which a test gives up, however slow the machine


def running(processes: list[subprocess.Popen[str]]) -> None:
    """Wait until the answer is in full flow."""
    for _ in range(4):
        assert processes[0].stdout is not None
        line = processes[0].stdout.readline()
        assert line.startswith("["), processes[0].stderr and processes[0].stderr.read()


def job(tmp_path: Path, split: str) -> dict[str, Any]:
    folder = str(write(tmp_path / "model", "dense", **SIZES))
    return {"split": split, "models": [{"folder": folder, "stream": PROMPT, "tasks": []}]}


def survivors_name(lost: int, processes: list[subprocess.Popen[str]]) -> None:
    for rank, process in enumerate(processes):
        if rank != lost:
            _, errors = process.communicate(timeout=HANG)
            assert process.returncode == 1
            assert f"error: rank {lost} of {len(processes)} " in errors


@pytest.mark.slow  # test_link.py has it in one process
@pytest.mark.parametrize("lost", [0, 1])
def test_the_rest_exit_and_name_the_rank_that_was_killed(lost: int, tmp_path: Path) -> None:
    with started(2, job(tmp_path, "tensor"), tmp_path) as processes:
        running(processes)
        processes[lost].kill()
        survivors_name(lost, processes)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_of_three_both_others_name_the_rank_that_was_killed(lost: int, tmp_path: Path) -> None:
    with started(3, job(tmp_path, "pipeline"), tmp_path) as processes:
        running(processes)
        processes[lost].kill()
        survivors_name(lost, processes)


@pytest.mark.slow
def test_the_rest_exit_and_name_the_rank_that_hangs(tmp_path: Path) -> None:
    with started(2, job(tmp_path, "tensor"), tmp_path) as processes:
        running(processes)
        processes[1].send_signal(signal.SIGSTOP)
        survivors_name(1, processes)


@pytest.mark.slow  # test_link.py has this, too, and what follows
def test_a_rank_that_cannot_read_its_model_ends_all(tmp_path: Path) -> None:
    only_here = job(tmp_path, "tensor")
    (tmp_path / "model").rename(tmp_path / "model-0")
    only_here["models"][0]["folder"] = str(tmp_path / "model-{rank}")
    with started(2, only_here, tmp_path) as processes:
        first, second = (process.communicate(timeout=HANG)[1] for process in processes)
        assert [process.returncode for process in processes] == [1, 1]
    assert f"error: rank 1 of 2 failed: {tmp_path / 'model-1'}" in first
    assert str(tmp_path / "model-1") in second  # whoever of its threads said it first


@pytest.mark.slow
def test_a_rank_that_generates_something_else_is_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / f"model-{rank}", "dense", seed=rank, **SIZES)
    models = [{"folder": str(tmp_path / "model-{rank}"), "stream": PROMPT, "tasks": []}]
    with started(2, {"split": "tensor", "models": models}, tmp_path) as processes:
        told = [process.communicate(timeout=HANG)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert all("error: rank 1 of 2 generated other tokens than rank 0 in step" in errors for errors in told), told


def test_a_rank_whose_sequence_ends_alone_is_named_before_anybody_waits_for_it(tmp_path: Path) -> None:
    with started(2, job(tmp_path, "tensor") | {"mute": 1}, tmp_path) as processes:
        told = [process.communicate(timeout=HANG)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert all("error: rank 1 of 2 has other sequences than rank 0" in errors for errors in told), told


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_its_device(tmp_path: Path) -> None:
    with started(2, {"unanswered": True}, tmp_path) as processes:
        _, errors = processes[0].communicate(timeout=HANG)
    assert processes[0].returncode == 1
    assert "ValueError: of the first rank" in errors


@pytest.mark.slow
def test_a_server_that_is_stopped_does_so_in_peace_on_every_rank(tmp_path: Path) -> None:
    """By a service manager, which may signal all of them."""
    folder = str(write(tmp_path / "model", "dense", **SIZES, vocab_size=8192))
    command = [f"{sysconfig.get_path('scripts')}/headstart", "serve", folder, "--port", "0"]
    with started(2, command, tmp_path) as processes:
        assert processes[0].stdout is not None
        told = [processes[0].stdout.readline() for _ in range(5)]
        address = told[4].removeprefix("Dashboard:").strip()
        httpx.Client(transport=httpx.HTTPTransport(retries=9)).get(f"{address}health").raise_for_status()
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=HANG)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert not any("error" in errors for errors in told)
