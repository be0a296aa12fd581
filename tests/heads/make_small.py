"""The constants of a training, so small that it takes seconds."""

from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_small(put: Callable[[ModuleType, str, Any], None], text: ModuleType, train: ModuleType) -> None:
    for name, value in {"PROMPT": 8, "ANSWER": 24, "HELD_ANSWER": 24, "NARROW": 4, "WIDE": 4}.items():
        put(text, name, value)
    for name, value in {"HELD": 3, "WARM": 2, "RATE": 3e-3, "MOST_ROWS": 2}.items():
        put(train, name, value)
