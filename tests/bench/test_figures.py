"""From runs to figures: ratios within a repeat, acceptance by position, and a best depth chosen on other runs."""

import pytest

from headstart.bench.figures import figures, judge_auto, past_end
from headstart.bench.interval import estimate
from headstart.bench.run import K, Run
from headstart.bench.sweep import Cell, Runs


def made(rate: float, rounds: list[tuple[int, int]] | None = None, texts: list[list[int]] | None = None) -> Run:
    rounds = rounds or [(0, 0)] * 10
    tokens = sum(accepted + 1 for accepted, _ in rounds)
    return Run(tokens, tokens / rate, rounds, texts or [[1, 2, 3]])


def runs_at(rates: dict[K, list[float]], kind: str = "code", rows: int = 1) -> Runs:
    return {Cell(kind, rows): {k: [made(rate) for rate in each] for k, each in rates.items()}}


def test_an_interval_holds_its_median_and_narrows_with_agreement() -> None:
    wide, narrow = estimate([1.0, 2.0, 3.0, 4.0, 5.0]), estimate([3.0, 3.0, 3.0, 3.0, 5.0])
    assert (wide.median, wide.low, wide.high) == (3.0, 1.0, 5.0)
    assert (narrow.median, narrow.low, narrow.high) == (3.0, 3.0, 5.0)
    assert estimate([2.0] * 9) == estimate([2.0] * 3)


def test_a_ratio_is_taken_within_a_repeat_so_that_a_slow_machine_does_not_decide() -> None:
    plain, drafted = [100.0, 10.0, 50.0], [150.0, 15.0, 75.0]
    found = {f.k: f for f in figures(runs_at({0: plain, 2: drafted}))}
    assert found[2].to_plain.median == found[2].to_plain.low == found[2].to_plain.high == pytest.approx(1.5)
    assert found[2].tokens_per_second == 75.0
    assert found[0].to_plain.median == 1.0


def test_acceptance_is_counted_where_a_draft_was_tried() -> None:
    """Rounds of different depths, as auto makes them: a shorter one says nothing of the positions it did not try."""
    rounds = [(2, 2), (1, 2), (0, 2), (1, 1), (1, 1), (0, 1), (0, 0), (0, 0)]
    cell = Cell("code", 1)
    figure = figures({cell: {0: [made(1.0)], "auto": [made(1.0, rounds)]}})[1]
    assert figure.cumulative == pytest.approx([4 / 6, 1 / 3])
    assert figure.conditional == pytest.approx([4 / 6, 1 / 2])
    assert figure.tokens_per_round == pytest.approx(13 / 8)
    assert figure.drafts_per_round == pytest.approx(9 / 8)


def test_other_tokens_than_plain_decoding_are_noticed() -> None:
    plain, shorter, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 7]]
    cell = Cell("code", 2)
    runs: Runs = {cell: {0: [made(1, texts=plain)] * 2, 1: [made(1, texts=shorter)] * 2, 2: [made(1, texts=plain)]}}
    runs[cell][2] = [made(1, texts=plain), made(1, texts=other)]
    assert [figure.identical for figure in figures(runs)] == [True, True, False]


def test_the_best_fixed_depth_is_chosen_on_the_other_half_of_the_repeats() -> None:
    """k = 1 and k = 2 are the same, but each was lucky in one half. Chosen on the runs that are compared, the luck
    would count against auto."""
    runs = runs_at({0: [90.0] * 4, 1: [120.0, 100.0] * 2, 2: [100.0, 120.0] * 2, "auto": [110.0] * 4})
    verdict = judge_auto(runs)
    assert verdict is not None
    assert verdict.cells[0].best == [2, 1]  # by the odd repeats, and by the even ones
    assert verdict.to_best == pytest.approx(1.1)
    assert verdict.cells[0].to_plain.median == pytest.approx(110 / 90)


def test_the_best_fixed_depth_is_chosen_by_ratios_within_a_repeat() -> None:
    """k = 2 is better in all but the repeats in which the machine was neither fast nor slow, and these alone decide
    the median of tokens a second."""
    mood = [10.0, 10.0, 4.0, 4.0, 1.0, 1.0]  # each half has all three
    gains: dict[K, list[float]] = {0: [1.0] * 6, 1: [1.5, 1.5, 1.3, 1.3, 1.5, 1.5], 2: [1.8, 1.8, 1.2, 1.2, 1.8, 1.8]}
    gains["auto"] = gains[2]
    runs = runs_at({k: [gain * speed for gain, speed in zip(each, mood, strict=True)] for k, each in gains.items()})
    verdict = judge_auto(runs)
    assert verdict is not None
    assert verdict.cells[0].best == [2, 2]


def test_cells_that_lie_wholly_below_are_named_and_those_that_may_not_are_not() -> None:
    low, unsure = [94.0, 94.0, 94.0, 94.0], [90.0, 90.0, 99.0, 99.0]
    runs = runs_at({0: [100.0] * 4, 1: [50.0] * 4, "auto": low}, "prose") | runs_at(
        {0: [100.0] * 4, 1: [50.0] * 4, "auto": unsure}
    )
    verdict = judge_auto(runs)
    assert verdict is not None
    assert [cell.kind for cell in verdict.below_best] == ["prose"]
    assert [cell.kind for cell in verdict.below_plain] == ["prose"]
    assert verdict.to_best == pytest.approx((0.94 * 0.945) ** 0.5)


def test_without_auto_there_is_nothing_to_judge() -> None:
    assert judge_auto(runs_at({0: [1.0], 1: [1.0]})) is None


def test_tokens_past_the_end_are_counted_by_kind() -> None:
    runs: Runs = {
        Cell("chat", 1): {0: [made(1, texts=[[5, 9, 5, 5]])]},
        Cell("chat", 2): {0: [made(1, texts=[[5, 5, 5, 9], [9, 5, 5, 5]])]},
        Cell("code", 1): {0: [made(1, texts=[[5, 5, 5, 5]])]},
    }
    assert past_end(runs, {9}) == {"chat": pytest.approx((0.5 + 0.0 + 0.75) / 3), "code": 0.0}
