"""From trials to measurements: ratios within a repeat, acceptance by position, and a best depth chosen elsewhere."""

from typing import Any

import pytest

from headstart.bench.measurement import Estimate, Measurement, Trial, accepted_shares, summarise
from headstart.bench.plan import BenchPlan, Condition

CODE = Condition("code", "batch_size", 1)


def trial(rate: float, **more: Any) -> Trial:
    return Trial(**{"tokens": 100, "seconds": 100 / rate, "tokens_per_round": 1.0, "sequences": [[1, 2, 3]]} | more)


def measured(**trials: list[Trial]) -> dict[str, Measurement]:
    by_variant = {name.replace("k", "k="): dict(enumerate(each)) for name, each in trials.items()}
    plan = BenchPlan(list(by_variant), ["code"], "batch_size", [1])
    return {each.variant: each for each in summarise(plan, {CODE: by_variant})}


def rates(**by_variant: list[float]) -> dict[str, Measurement]:
    return measured(**{name: [trial(rate) for rate in each] for name, each in by_variant.items()})


def test_an_estimate_has_the_range_of_all_repeats() -> None:
    found = Estimate.of([2.0, 1.0, 9.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 9.0)


def test_shares_of_positions_that_were_hardly_tried_are_left_out() -> None:
    assert accepted_shares([9, 5, 1], [10, 10, 9]) == [0.9, 0.5]
    assert accepted_shares([1], [2]) == []


def test_a_ratio_is_taken_within_a_repeat_so_that_a_slow_machine_does_not_decide() -> None:
    found = rates(k0=[100.0, 10.0, 50.0], k2=[150.0, 15.0, 75.0])
    speedup = found["k=2"].relative["tokens_per_second"]
    assert (speedup.low, speedup.median, speedup.high) == pytest.approx((1.5, 1.5, 1.5))
    assert found["k=2"].tokens_per_second.median == 75.0
    assert found["k=0"].relative == {}


def test_an_interrupted_repeat_counts_for_what_was_measured() -> None:
    found = rates(k0=[100.0], k2=[150.0, 200.0])
    assert found["k=2"].repeats == 2
    assert found["k=2"].relative["tokens_per_second"].high == 1.5
    assert rates(k2=[1.0])["k=2"].relative == {}


def test_acceptance_is_summed_over_repeats_whatever_their_depth() -> None:
    drafted = [trial(1.0, proposed=[20, 4], accepted=[15, 2]), trial(1.0, proposed=[20], accepted=[5])]
    found = measured(k0=[trial(1.0)] * 2, k2=drafted)["k=2"]
    assert found.acceptance_by_position == [0.5]  # the second was tried four times
    assert found.acceptance_rate == pytest.approx(22 / 44)


def test_a_step_takes_what_its_tokens_take() -> None:
    assert measured(k0=[trial(50.0, tokens_per_round=2.0)])["k=0"].step_ms == pytest.approx(40.0)


def test_other_tokens_than_plain_decoding_are_noticed() -> None:
    plain, shorter, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 7]]
    found = measured(
        k0=[trial(1, sequences=plain)] * 2,
        k1=[trial(1, sequences=shorter)] * 2,
        k2=[trial(1, sequences=plain), trial(1, sequences=other)],
    )
    assert [each.identical for each in found.values()] == [True, True, False]


def test_the_best_fixed_depth_is_chosen_on_the_other_repeats() -> None:
    """k=1 and k=2 are the same, but each was lucky once. Chosen on the repeat that is compared, luck would count
    against auto."""
    found = rates(k0=[90.0] * 2, k1=[120.0, 100.0], k2=[100.0, 120.0], kauto=[110.0] * 2)["k=auto"]
    assert found.relative["best_fixed"].median == pytest.approx(1.1)
    assert found.relative["tokens_per_second"].median == pytest.approx(110 / 90)


def test_the_best_fixed_depth_is_chosen_by_ratios_within_a_repeat() -> None:
    """In absolute tokens per second the machine's slow repeats would decide."""
    speed = [10.0, 4.0, 1.0]
    gains = {"k0": [1.0] * 3, "k1": [1.5, 1.3, 1.5], "k2": [1.8, 1.2, 1.8], "kauto": [1.8, 1.2, 1.8]}
    found = rates(**{k: [gain * pace for gain, pace in zip(each, speed, strict=True)] for k, each in gains.items()})
    best = found["k=auto"].relative["best_fixed"]
    assert (best.low, best.high) == pytest.approx((1.0, 1.0))  # k=2 was chosen in every repeat


def test_one_repeat_is_not_enough_to_choose_by() -> None:
    assert "best_fixed" not in rates(k0=[1.0], k1=[1.0], kauto=[1.0])["k=auto"].relative
