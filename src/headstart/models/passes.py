"""Passes that stop between two layers: generators, so that other work may come between."""

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


def finish(steps: Generator[Any, None, T]) -> T:
    """Return what a generator returns, whatever it yields."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made
