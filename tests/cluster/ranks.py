"""Start ranks on this machine, as `mlx.launch` does, but leave them alone: it would end the rest when one ends."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "rank.py"
NOT_COMPILED = {"MLX_DISABLE_COMPILE": "1"}  # the same bits, without a compiler run in every process


@contextmanager
def started(ranks: int, job: dict[str, Any] | list[str], tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each rank, with a job for rank.py or a command of its own; all of them are over at the end."""
    command = job if isinstance(job, list) else [sys.executable, str(SCRIPT), json.dumps(job)]
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(ranks)]))
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | NOT_COMPILED | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)},
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def run(ranks: int, job: dict[str, Any], tmp_path: Path) -> list[list[dict[str, Any]]]:
    """The results of every rank, which must end well."""
    with started(ranks, job, tmp_path) as processes:
        told = [process.communicate(timeout=300) for process in processes]
    problems = [errors for process, (_, errors) in zip(processes, told, strict=True) if process.returncode]
    assert not problems, "\n".join(problems)
    return [json.loads(output.splitlines()[-1]) for output, _ in told]


def free_ports(count: int) -> list[int]:
    """Ports below those that systems hand out: a connection of another test could take one before a rank does, and
    ranks would wait for each other for ever."""
    ports: list[int] = []
    for port in random.sample(range(10_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError("no port is free")
