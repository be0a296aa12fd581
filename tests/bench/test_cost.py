"""What drafts cost: β, δ and the acceptance at which a depth pays."""

from collections.abc import Sequence
from typing import Any

import pytest

from fixtures import random_model, random_prompt
from headstart.bench import cost
from headstart.bench.cost import break_even, looks, measure_costs


def test_break_even_is_the_acceptance_that_makes_up_for_the_longer_step() -> None:
    assert break_even(1, 1.5) == pytest.approx(0.5)
    assert break_even(3, 1 + 0.7 + 0.7**2 + 0.7**3) == pytest.approx(0.7)
    assert break_even(2, 3.0) == pytest.approx(1.0)
    assert break_even(2, 0.9) == pytest.approx(0.0)  # a step that is no longer pays with any draft
    assert break_even(2, 3.1) is None


def test_verification_and_drafts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose window costs 10 + 2k and whose drafts cost 3, while it slows down from look to look."""
    slower = iter(range(1000))

    def seconds(model: Any, prompts: Sequence[Any], k: int, drafted: bool) -> float:
        return (10 + 2 * k + 3 * k * drafted) * len(prompts) * (1 + 1e-6 * next(slower))

    monkeypatch.setattr(cost, "_seconds", seconds)
    costs = measure_costs(random_model(), [[1, 2]], rows=[1, 4], ks=[2, 4], repeats=3)
    assert [(c.rows, c.k) for c in costs] == [(1, 0), (1, 2), (1, 4), (4, 0), (4, 2), (4, 4)]
    for c in costs:
        assert c.seconds == pytest.approx(c.rows * (10 + 5 * c.k), rel=1e-3)
        assert c.ratio == pytest.approx(1 + 0.5 * c.k, rel=1e-3)
        assert c.verify == pytest.approx(1 + 0.2 * c.k, rel=1e-3)
        assert c.draft == (pytest.approx(0.3, rel=1e-3) if c.k else None)
        assert c.break_even == (break_even(c.k, c.ratio) if c.k else None)


def test_every_rows_and_depth_is_measured_and_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "STEPS", 1)
    model, told = random_model(), []
    prompts = [random_prompt(model, length, seed=length) for length in (1, 5)]
    costs = measure_costs(model, prompts, rows=[1, 3], ks=[0, 2], repeats=1, progress=lambda: told.append(1))
    assert [(c.rows, c.k) for c in costs] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    assert all(c.seconds > 0 for c in costs)
    assert len(told) == looks([1, 3], [0, 2], 1) == 12
