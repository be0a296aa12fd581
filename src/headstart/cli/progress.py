"""Progress on standard error: a line that is rewritten on a terminal, a line now and then anywhere else."""

import sys
import time

SECONDS_PER_LINE = 5.0  # in a log


def show_line(text: str) -> None:
    """Replace the line on a terminal. Anywhere else, do nothing."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class Progress:
    """Report how much of `total` is done, what is being done and about how long the rest takes."""

    def __init__(self, total: int, unit: str):
        self.total = total
        self.unit = unit
        self.done = 0
        self.begun = False
        self.started = time.monotonic()
        self.printed = -SECONDS_PER_LINE

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        show_line("")

    def begin(self, doing: str) -> None:
        """Report what is about to be done. It counts as done when the next one begins."""
        self.add(int(self.begun), doing)
        self.begun = True

    def add(self, count: int, doing: str = "") -> None:
        """Report that so much more is done."""
        self.done += count
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        first_estimate = self.done == count == 1
        if now - self.printed < (0.1 if terminal else SECONDS_PER_LINE) and not first_estimate:
            return
        self.printed = now
        left = ""
        if self.done:
            seconds = (now - self.started) * (self.total - self.done) / self.done
            left = f", about {seconds:.0f} s left" if seconds < 100 else f", about {seconds / 60:.0f} min left"
        line = f"{self.done:,} of {self.total:,} {self.unit}{left}{': ' if doing else ''}{doing}"
        if terminal:
            show_line(line)
        else:
            print(line, file=sys.stderr, flush=True)
