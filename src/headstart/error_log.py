"""Log failures with their traceback, but without text that may come from a client."""

import logging
import re
import time
import traceback
from threading import Lock

LOG = logging.getLogger("headstart.engine")
MOST = 10  # records of one failure per WINDOW: a failure that repeats in a loop must not fill the disk
WINDOW = 60.0  # seconds

# "[malloc] Unable to allocate …", "[METAL] Command buffer execution failed …", "cudaMalloc failed: out of memory"
MLX = re.compile(r"\[[\w:. ]+\] |cu(da)?[A-Z]\w*|CUDA ")

_lock = Lock()
_seen: dict[tuple[str, type[BaseException]], tuple[float, int]] = {}  # start of the window, and failures since


def log_error(log: logging.Logger, message: str, *arguments: object, error: BaseException) -> None:
    """Log `message` and the traceback of `error`, at most MOST times per WINDOW for one message and error type."""
    now, missed = time.monotonic(), 0
    with _lock:
        began, count = _seen.get((message, type(error)), (now, 0))
        if now - began >= WINDOW:
            missed, began, count = max(0, count - MOST), now, 0
        _seen[message, type(error)] = began, count + 1
    if count >= MOST:
        return
    if missed:
        message += f" ({missed} more like it were not logged)"
    elif count == MOST - 1:
        message += f" (more like it in the next {WINDOW:g} s will not be logged)"
    log.error(f"{message}\n%s", *arguments, format_error(error))


def format_error(error: BaseException) -> str:
    """Return the traceback of an error and of its causes: types, files, lines and functions.

    The message is left out unless it is MLX's: libraries quote their input in theirs, and that may be a prompt or a
    key.
    """
    return "".join(_lines(error)).rstrip()


def _lines(error: BaseException) -> list[str]:
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    lines = [*_lines(cause), "which led to\n"] if cause is not None else []
    is_mlx = isinstance(error, RuntimeError | MemoryError) and MLX.match(str(error))
    lines += [type(error).__name__, f": {error}\n" if is_mlx else "\n"]
    lines += traceback.format_list(traceback.extract_tb(error.__traceback__))
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*lines, *(line for each in inner for line in _lines(each))]
