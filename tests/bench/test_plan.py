"""The loop of a benchmark: everything is measured as often as planned, interleaved, and kept when it is cut short."""

from collections.abc import Callable

import pytest

from headstart.bench.measurement import Trial
from headstart.bench.plan import BenchPlan, Condition, run_plan
from headstart.errors import HeadstartError

PLAN = BenchPlan(["k=0", "k=1", "k=2"], ["code", "chat"], "batch_size", [1, 4], repeats=3)


def test_every_variant_is_measured_under_every_condition_in_a_new_order_each_time() -> None:
    measured: list[tuple[str, Condition, int]] = []
    progress: list[str] = []

    def measure(variant: str, condition: Condition, repeat: int) -> Trial:
        measured.append((variant, condition, repeat))
        return Trial(1, 1.0)

    trials, stopped = run_plan(PLAN, measure, progress.append)
    assert stopped is None
    assert len(measured) == len(progress) == PLAN.runs == (3 + 1) * 4 * 3
    groups = [measured[i : i + 3] for i in range(0, len(measured), 3)]  # the variants of one condition and repeat
    assert all(len({(condition, repeat) for _, condition, repeat in group}) == 1 for group in groups)
    orders = [tuple(variant for variant, _, _ in group) for group in groups]
    assert all(sorted(order) == ["k=0", "k=1", "k=2"] for order in orders)
    assert len(set(orders)) > 1
    assert progress[0] == f"{measured[0][0]}, code, batch of 1"
    assert list(trials) == PLAN.conditions
    assert all(list(each) == [0, 1, 2] for by_variant in trials.values() for each in by_variant.values())


@pytest.mark.parametrize(
    ("error", "why"), [(KeyboardInterrupt(), "interrupted"), (HeadstartError("server down"), "server down")]
)
def test_trials_until_an_interruption_are_kept(error: BaseException, why: str) -> None:
    def stop_after(count: int) -> Callable[[str, Condition, int], Trial]:
        runs = iter(range(count))

        def measure(variant: str, condition: Condition, repeat: int) -> Trial:
            if next(runs, None) is None:
                raise error
            return Trial(1, 1.0)

        return measure

    trials, stopped = run_plan(PLAN, stop_after(12 + 5), lambda doing: None)  # 12 warm up
    assert stopped == why
    assert sum(len(each) for by_variant in trials.values() for each in by_variant.values()) == 5
    with pytest.raises(type(error)):
        run_plan(PLAN, stop_after(12), lambda doing: None)


def test_a_plan_describes_what_it_will_do() -> None:
    assert str(PLAN) == (
        "k=0, k=1, k=2 on code, chat prompts, batch of 1, batch of 4: 48 runs of 64 tokens per sequence (3 repeats "
        "and one to warm up)"
    )
    conditions = [Condition("short", "concurrency", 4), Condition("short", "rate", 0.5)]
    assert [str(each) for each in conditions] == ["short, 4 at a time", "short, 0.5 per second"]
