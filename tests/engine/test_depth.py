"""The choice of depth, on machines and texts made of numbers (`simulator.py`), and in the running engine."""

import statistics
from collections.abc import Sequence
from itertools import product

import pytest
from simulator import Costs, Text, simulate

from fixtures import builtin_model, collect, generate, random_model, random_prompt, submit
from headstart.engine import Depth, Engine
from headstart.engine.depth import Drafter

MACHINES: dict[str, Costs] = {
    "flat": lambda rows, k, round: 1 + 0.02 * k * rows + 0.05 * k,
    "linear": lambda rows, k, round: (1 + 0.9 * k) * rows,
    "cpu": lambda rows, k, round: (1 + 0.5 * k) * rows**0.8,
    "step at 8": lambda rows, k, round: (1.0 if rows * (k + 1) <= 8 else 2.0) + 0.06 * k,
    "drifting": lambda rows, k, round: (1 + 0.3 * k) * (1 + round / 400),
}
TEXTS: dict[str, Text] = {
    "good": lambda round, j: 0.9,
    "falling": lambda round, j: (0.9, 0.8, 0.6, 0.4, 0.3, 0.2, 0.2, 0.2)[j],
    "poor": lambda round, j: 0.3,
    "good, then poor": lambda round, j: 0.9 if round < 300 else 0.25,
    "poor, then good": lambda round, j: 0.25 if round < 300 else 0.9,
}
EVERY = list(product(MACHINES, TEXTS))


def mean_share(machine: str, text: str, *, rows: int = 1, busy: bool = False) -> float:
    runs = [
        simulate(MACHINES[machine], TEXTS[text], 600, rows=lambda round: rows, busy=busy, seed=s) for s in range(4)
    ]
    return statistics.mean(run.share() for run in runs)


@pytest.mark.parametrize("rows", [1, 4])
def test_depth_earns_what_the_best_choice_would_on_every_machine_and_text(rows: int) -> None:
    """The best choice knows every chance and cost, and when they change; this one measures them, through noise and
    hiccups. Over 600 rounds, what it spends on finding out included."""
    shares = {(machine, text): mean_share(machine, text, rows=rows) for machine, text in EVERY}
    assert min(shares.values()) >= 0.95, shares


def test_other_work_on_the_machine_does_not_mislead_it() -> None:
    """Steps take up to twice as long for a while, and every clock is off by an eighth."""
    shares = {(machine, text): mean_share(machine, text, busy=True) for machine, text in EVERY}
    assert min(shares.values()) >= 0.93, shares
    assert statistics.mean(shares.values()) >= 0.95
