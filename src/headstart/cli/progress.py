"""Bars with the time left: of bytes for commands that move weights, of runs for those that measure."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
def counted_bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """Runs done, and the time left. Runs differ, but every repeat is like the others."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _in_tenths(title, total)
        return
    with Progress(*columns, console=console, speed_estimate_period=600) as progress:
        task = progress.add_task(title, total=total)
        yield lambda runs=1.0: progress.advance(task, runs)


def _in_tenths(title: str, total: int) -> Callable[..., None]:
    """Where nothing can be drawn, as in a log: a line each tenth of the way."""
    import typer

    begun, done, told = time.monotonic(), 0.0, 0

    def advance(runs: float = 1.0) -> None:
        nonlocal done, told
        done += runs
        if (tenths := int(10 * done / total + 1e-6)) > told:
            told, left = tenths, (time.monotonic() - begun) * (total / done - 1)
            typer.echo(f"{title}: {10 * told}%, about {left / 60:.0f} min left", err=True)

    return advance
