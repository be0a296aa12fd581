"""Progress with the time left: of bytes for commands that move weights, of runs for those that measure."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_PER_LINE = 20.0


@contextmanager
def bytes_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def run_progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that is called before each of `total` runs with what it does.

    A terminal gets a bar. Anywhere else, as in a log, a line is printed every 20 seconds, during long runs too.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    if console.is_terminal:
        with Progress(*columns, console=console, speed_estimate_period=600) as progress:
            task = progress.add_task("", total=total, completed=-1)
            yield lambda doing: progress.update(task, advance=1, description=doing)
        return
    lines = ProgressLines(total)
    stop = threading.Event()
    thread = threading.Thread(target=lines.print_until, args=(stop,), daemon=True)
    thread.start()
    try:
        yield lines.begin
    finally:
        stop.set()
        thread.join()


class ProgressLines:
    """Print what is being done and the time that is left, from a thread of its own."""

    def __init__(self, total: int):
        self.total = total
        self.begun = -1
        self.doing = ""
        self.started = time.monotonic()

    def begin(self, doing: str) -> None:
        self.begun += 1
        self.doing = doing
        if self.begun == 1:  # the first run tells how long all of them will take
            self.print()

    def print_until(self, stop: threading.Event) -> None:
        while not stop.wait(SECONDS_PER_LINE):
            self.print()

    def print(self) -> None:
        import typer

        left = ""
        if self.begun > 0:
            seconds = (time.monotonic() - self.started) * (self.total - self.begun) / self.begun
            left = f", about {seconds:.0f} s left" if seconds < 100 else f", about {seconds / 60:.0f} min left"
        typer.echo(f"{max(self.begun, 0)} of {self.total} runs{left}: {self.doing}", err=True)
