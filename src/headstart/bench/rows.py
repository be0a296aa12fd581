"""Prompts for so many rows."""

from collections.abc import Sequence
from itertools import cycle, islice


def spread(prompts: Sequence[Sequence[int]], rows: int) -> list[Sequence[int]]:
    """A prompt for each row; where there are too few, some have the same."""
    return list(islice(cycle(prompts), rows))
