"""A process that ends right after a thread that generated must not abort."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from headstart import thread_exit

PROGRAM = """
import threading, mlx.core as mx
from headstart.thread_exit import wait_at_exit
kept = []
def work():
    wait_at_exit()
    for n in range(60):
        function = mx.compile(lambda x, n=n: mx.exp(x) * 2 + n)
        mx.eval(function(mx.ones((8,))))
        kept.append(function)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
GENERATE = """
import asyncio, headstart
model, tokenizer = headstart.load()
async def main():
    return await asyncio.to_thread(headstart.generate, model, tokenizer, "def f", max_tokens=4, k=0)
print(asyncio.run(main()))
from headstart import thread_exit
assert len(thread_exit._threads) == 1
"""


def exit_code(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode


@pytest.mark.slow
def test_what_a_thread_compiled_does_not_abort_the_process() -> None:
    """Without the wait one in four of these processes aborts."""
    assert [exit_code(PROGRAM) for _ in range(20)] == [0] * 20


def test_generating_in_a_thread_makes_the_process_wait_for_it() -> None:
    assert exit_code(GENERATE) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the system must list its threads")
@pytest.mark.parametrize(
    ("gone", "alive", "waits"), [(True, False, False), (False, True, False), (False, False, True)]
)
def test_exit_waits_for_threads_that_ended_for_python_only(
    monkeypatch: pytest.MonkeyPatch, gone: bool, alive: bool, waits: bool
) -> None:
    class Ended(threading.Thread):
        native_id = 2**22 + 1 if gone else threading.get_native_id()  # no such thread, or one that there is

        def is_alive(self) -> bool:
            return alive

    monkeypatch.setattr(thread_exit, "_threads", {Ended()})
    monkeypatch.setattr(thread_exit, "MAX_SECONDS", 0.1)
    sleeps: list[float] = []
    monkeypatch.setattr(thread_exit, "time", SimpleNamespace(sleep=sleeps.append, monotonic=time.monotonic))
    thread_exit.wait_for_threads()
    assert bool(sleeps) == waits


def test_threads_that_ended_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_exit, "_threads", set())
    for _ in range(5):
        thread = threading.Thread(target=thread_exit.wait_at_exit)
        thread.start()
        thread.join()
    assert thread_exit._threads == {thread}
