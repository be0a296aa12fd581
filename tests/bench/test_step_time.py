"""Times of a step at each depth: ratios are taken within a repeat."""

from collections.abc import Sequence
from typing import Any

import pytest

from fixtures import random_model, random_prompt
from headstart.bench import step_time
from headstart.bench.step_time import time_depths


def test_a_machine_that_slows_down_does_not_change_the_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(1000))

    def seconds(model: Any, prompts: Sequence[Any], k: int) -> float:
        return (10 + 5 * k) * (1 + next(looks) // 3)  # slower in every repeat of three depths

    monkeypatch.setattr(step_time, "step_seconds", seconds)
    times = time_depths(random_model(), [1, 2], depths=[2, 4])
    assert [(each.k, each.ratio) for each in times] == [(0, 1.0), (2, 2.0), (4, 3.0)]


def test_real_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "STEPS", 1)
    model = random_model()
    times = time_depths(model, random_prompt(model, 5), depths=[0, 2])
    assert [each.k for each in times] == [0, 2]
    assert all(each.seconds > 0 for each in times)
