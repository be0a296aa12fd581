"""The choice of depth, on machines and texts made of numbers (`simulator.py`), and in the running engine."""

import statistics
from itertools import product

import pytest
from simulator import Costs, Text, simulate

from fixtures import builtin_model, generate, random_model, random_prompt
from headstart.engine import Depth
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
    "poor": lambda round, j: 0.3,
    "good, then poor": lambda round, j: 0.9 if round < 300 else 0.25,
    "poor, then good": lambda round, j: 0.25 if round < 300 else 0.9,
}


def test_depth_earns_most_of_what_the_best_choice_would() -> None:
    """The best choice knows every chance and cost, and when they change; this one measures them, through noise and
    hiccups. Over 600 rounds, what it spends on finding out included."""
    shares = {}
    for (machine, costs), (text, chances) in product(MACHINES.items(), TEXTS.items()):
        shares[machine, text] = statistics.mean(simulate(costs, chances, 600, seed=seed).share for seed in range(3))
    assert statistics.mean(shares.values()) > 0.95
    assert min(shares.values()) > 0.88, min(shares, key=shares.__getitem__)


def test_depth_parks_where_drafts_lose_and_comes_back_when_they_win() -> None:
    result = simulate(MACHINES["cpu"], TEXTS["poor, then good"], 600)
    assert statistics.mean(k > 0 for k in result.depths[100:300]) < 0.2
    assert statistics.mean(k > 0 for k in result.depths[360:]) > 0.8


def test_depth_is_found_again_after_a_burst() -> None:
    rows = lambda round: 8 if 300 <= round < 400 else 1  # noqa: E731
    result = simulate(MACHINES["step at 8"], TEXTS["good"], 600, rows=rows)
    before, after = result.depths[250:300], result.depths[410:450]
    assert abs(statistics.median(before) - statistics.median(after)) <= 1


def test_no_row_is_drafted_for_beyond_its_ceiling() -> None:
    depth = Depth()
    assert all(depth.choose([Drafter(0), Drafter(0)]) == 0 for _ in range(30))
    assert all(depth.choose([Drafter(2), Drafter(0)]) <= 2 for _ in range(30))
    assert max(Depth(most=3).choose([Drafter(8)]) for _ in range(30)) <= 3


@pytest.mark.parametrize("family", ["dense", "moe", "next"])
def test_greedy_and_seeded_output_is_that_of_plain_decoding(family: str) -> None:
    model = random_model(family)
    for params in ({}, {"temperature": 0.8, "seed": 5}):
        prompt = random_prompt(model, 13)
        plain = generate(model, prompt, max_tokens=80, k=0, **params)
        auto = generate(model, prompt, max_tokens=80, **params)
        assert auto.tokens == plain.tokens
        assert len(auto.stats.depths) > 1  # it did try


def test_the_built_in_model_says_the_same_whatever_depth_is_chosen() -> None:
    model, prompt = builtin_model(), [5, 900, 31, 7]
    assert generate(model, prompt, max_tokens=24).tokens == generate(model, prompt, max_tokens=24, k=0).tokens
