"""Headstart as on a Mac, as far as Linux can play one: run by `test_darwin.py` in a process of its own.

Other packages stay those of Linux. Of ours, every module is imported again after the names that only Linux has are
gone, the system says that it is Darwin, and MLX that it has Metal: kernels do not compile, and its operations compute
on the CPU.
"""

import builtins
import importlib
import os
import pkgutil
import platform
import select
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

import headstart
from checkpoints import write

LINUX = {  # names that Python does not have on macOS
    os: (
        "sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd", "posix_fadvise",
        "posix_fallocate", "fdatasync", "splice", "copy_file_range", "getresuid", "getresgid", "setresuid", "unshare",
        "setns", "O_TMPFILE", "O_PATH", "O_DIRECT", "pipe2", "accept4", "getrandom",
        "close_range", "sched_setscheduler",
    ),
    signal: ("sigwaitinfo", "sigtimedwait", "SIGPWR", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX", "SIGPOLL", "SIGCLD"),
    socket: ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_VSOCK", "AF_NETLINK", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT"),
    select: ("epoll", "EPOLLIN"),
    time: ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC_COARSE", "pthread_getcpuclockid"),
}  # fmt: skip
MAC: dict[str, Any] = {
    "device_name": "Apple M1", "architecture": "applegpu_g13g", "memory_size": 16 << 30,
    "max_recommended_working_set_size": 11_840 << 20, "max_buffer_length": 8 << 30, "resource_limit": 499_000,
}  # fmt: skip


def import_all() -> list[str]:
    """Import every module of ours."""
    names = [each.name for each in pkgutil.walk_packages(headstart.__path__, "headstart.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    return names


def become_a_mac() -> None:
    """Take away what only Linux has."""
    for module, names in LINUX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    opened, read = builtins.open, Path.open

    def refuse(path: object) -> None:
        if str(path).startswith(("/proc", "/sys/fs")):
            raise FileNotFoundError(2, "No such file or directory", str(path))

    def open_file(path: Any, *given: Any, **named: Any) -> Any:
        refuse(path)
        return opened(path, *given, **named)

    def open_path(path: Path, *given: Any, **named: Any) -> Any:
        refuse(path)
        return read(path, *given, **named)

    builtins.open = open_file  # type: ignore[assignment]
    Path.open = open_path  # type: ignore[method-assign, assignment]
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    platform.machine = lambda: "arm64"
    platform.processor = lambda: "arm"
    platform.mac_ver = lambda *_: ("15.5", ("", "", ""), "arm64")  # type: ignore[assignment]
    mx.metal.is_available = lambda: True
    mx.default_device = lambda: mx.Device(mx.gpu, 0)
    mx.device_info = lambda *_: MAC
    streams = mx.new_thread_unsafe_stream
    mx.new_thread_unsafe_stream = lambda _: streams(mx.cpu)


def drop_ours() -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "headstart"]:
        del sys.modules[name]


def play() -> None:
    import_all()  # what others import late does not count
    drop_ours()
    become_a_mac()
    print("modules =", len(import_all()))

    from headstart.bench.machine import current_load, device_facts, memory_facts
    from headstart.checkpoint import load_model
    from headstart.cli.main import app
    from headstart.engine import Engine, Request
    from headstart.kernels.metal import choice, stock
    from headstart.sampling import SamplingParams

    for name, value in (device_facts() | memory_facts()).items():
        print(name, "=", value)
    print("load =", current_load())
    stock.gated_delta_kernel = gated_delta_ops  # mlx-lm has its kernel only where MLX had Metal from the start
    choice.REPEATS, choice.LAUNCHES, choice.TIMED = 1, 1, (1,)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "dense")
        model = load_model(Path(folder))
    print("backend =", type(model.backend).__name__, model.dtype_name, model.backend)
    events = Engine(model).submit(Request([3, 5, 7], SamplingParams(max_tokens=4, k=2)))
    last = list(events)[-1]
    print("finish =", last.finish_reason, last.error)
    assert last.stats is not None
    print("tokens =", last.stats.generation_tokens)
    app(["serve", "--help"])


if __name__ == "__main__":
    play()
