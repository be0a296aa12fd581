"""What an iteration depends on beside its sequences: which requests come and go, what is drafted, and how
much of a prompt is read.

An engine alone decides by itself. On several machines one engine decides, and tells the others before they act: see
`cluster/engine.py`, whose classes take the place of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .depth import Plan
from .request import Handle

if TYPE_CHECKING:
    from .engine import Engine
    from .scheduler import Scheduler


class Decisions:
    alone = True
    """Whether no other machine repeats what this engine does. Otherwise no failure is recovered from, and where steps
    are not launched ahead each one is read before the next starts, so that all machines have compared it."""

    def begin(self, engine: Engine) -> None:
        """Prepare an engine that follows these decisions."""

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Enclose an iteration of the engine."""
        yield

    def cancelled(self, handles: Set[Handle]) -> Set[Handle]:
        """Return the requests to end now, of which clients have cancelled `handles`."""
        return handles

    def admit(self, scheduler: Scheduler) -> None:
        """Move sequences from the queue to those whose prompts are read."""
        scheduler.admit()

    def plan(self, choose: Callable[[], Plan]) -> Plan:
        """Return what to draft in the next step. `choose` asks the depth controller."""
        return choose()

    def slice(self, choose: Callable[[], int]) -> int:
        """Return how many tokens of a prompt to read before the next step. `choose` goes by the clock."""
        return choose()

    def observe(self, report: list[list[int]]) -> None:
        """Take note of what a step generated."""

    def clear_prefix(self) -> None:
        """Take note that the prefix cache is emptied between two iterations."""
