"""The controller takes the source and the length of block that earn most: a block costs one pass for any length."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from headstart.engine.depth import DepthController, Plan
from headstart.engine.draft import Source
from headstart.engine.draft_history import DraftHistory
from headstart.engine.step_time import Cell

LIMITS = {Source.BLOCK: 15, Source.HEAD: 5}
Chance = Callable[[int], float]  # by position, that a draft is accepted if all before it were


def plans(block: Chance, head: Chance, *, position: float, rounds: int = 500) -> Counter[Plan]:
    """Plans of the last 200 rounds. A step costs 1, a position `position`, a draft of the head .06, a block .12."""

    def seconds(k: int, source: int) -> float:
        drafting = {Source.HEAD: 0.06 * k, Source.BLOCK: 0.12, Source.NONE: 0.0}[Source(source)] if k else 0.0
        return 1 + position * k + drafting

    rng, controller = random.Random(5), DepthController(15, 2, [*LIMITS], LIMITS)
    cells = [Cell(1, 0), Cell(1, 1), Cell(1, 3), Cell(1, 3, Source.BLOCK), Cell(1, 15, Source.BLOCK)]
    controller.step_time.calibrate({cell: [seconds(cell.k, cell.source)] for cell in cells})
    history, chosen = DraftHistory(15), Counter[Plan]()
    for number in range(rounds):
        plan = controller.plan([history], [None])
        assert plan.k <= LIMITS.get(Source(plan.source), 0) or not plan.k
        chance = {Source.BLOCK: block, Source.HEAD: head}[Source(plan.source)]
        accepted = next((j for j in range(plan.k) if rng.random() >= chance(j)), plan.k)
        took = seconds(plan.k, plan.source) * rng.uniform(0.98, 1.02)
        controller.observe([history], plan.k, [(accepted, plan.k)], took, plan.source)
        chosen[plan] += number >= rounds - 200
    return chosen


def share(chosen: Counter[Plan], wanted: Callable[[Plan], bool]) -> float:
    return sum(count for plan, count in chosen.items() if wanted(plan)) / chosen.total()


@pytest.mark.parametrize(
    ("block", "head", "position", "wanted"),
    [
        (lambda j: 0.93, lambda j: 0.8, 0.01, lambda plan: plan.source == Source.BLOCK and plan.k >= 8),
        (
            lambda j: 0.9 if j < 3 else 0.1,
            lambda j: 0.6,
            0.04,
            lambda plan: plan.source == Source.BLOCK and plan.k <= 5,
        ),
        (lambda j: 0.3, lambda j: 0.9, 0.01, lambda plan: plan.source == Source.HEAD and plan.k >= 2),
        (lambda j: 0.5, lambda j: 0.4, 0.9, lambda plan: plan.k == 0),
    ],
    ids=["good blocks", "short blocks", "the head", "neither, where positions cost as much as steps"],
)
def test_what_earns_most_is_taken(
    block: Chance, head: Chance, position: float, wanted: Callable[[Plan], bool]
) -> None:
    chosen = plans(block, head, position=position)
    assert share(chosen, wanted) > 0.8, chosen.most_common(6)
