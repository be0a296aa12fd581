"""Keep a process from aborting when it exits right after a thread that used mlx.

mlx keeps what it compiled in thread-local storage, with Python objects in it, and releases it when the thread of the
operating system ends. To Python (before 3.13) a thread has ended a little earlier. If the interpreter shuts down in
between, the release finds no interpreter and the process aborts: "terminate called without an active exception"
(ml-explore/mlx#4110). So exit waits for such threads.
"""

import atexit
import sys
import threading
import time
from pathlib import Path

MAX_SECONDS = 2.0

_threads: set[threading.Thread] = set()


def wait_at_exit() -> None:
    """Make the process wait at exit until the calling thread is gone, unless it still runs then."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or thread in _threads:
        return
    _threads.difference_update([each for each in list(_threads) if not each.is_alive()])  # or they would pile up
    _threads.add(thread)


@atexit.register
def wait_for_threads() -> None:
    """Wait until those threads are gone that have ended for Python."""
    ended = [thread.native_id for thread in list(_threads) if not thread.is_alive()]
    if ended and sys.platform != "linux":
        time.sleep(0.05)  # the system does not list its threads; they need far less
    end = time.monotonic() + MAX_SECONDS
    while any(Path(f"/proc/self/task/{thread}").exists() for thread in ended) and time.monotonic() < end:
        time.sleep(0.001)
