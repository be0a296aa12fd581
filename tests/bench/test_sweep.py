"""The sweep: everything is measured as often as asked, interleaved, and what cannot be is refused at once."""

from typing import Any

import pytest

from fixtures import random_model, random_prompt
from headstart.bench import sweep as module
from headstart.bench.run import Run, Running
from headstart.bench.sweep import Cell, Plan, sweep
from headstart.errors import RequestError

PROMPTS = {"a": [random_prompt(random_model(), 5)], "b": [random_prompt(random_model(), 3)]}


def test_every_depth_of_every_cell_runs_as_often_as_asked() -> None:
    told: list[float] = []
    plan = Plan(PROMPTS, rows=(1, 2), ks=(0, 1, "auto"), tokens=20, repeats=2)
    runs = sweep(random_model(), plan, told.append)
    assert list(runs) == [Cell("a", 1), Cell("b", 1), Cell("a", 2), Cell("b", 2)]
    for cell, by_k in runs.items():
        assert {k: len(done) for k, done in by_k.items()} == {0: 2, 1: 2, "auto": 2}
        assert all(len(run.texts) == cell.rows for done in by_k.values() for run in done)
    assert sum(told) == pytest.approx(plan.count)
    assert plan.count == 2 * 3 + 4 * 3 * 2


def test_the_depths_of_a_repeat_take_turns_and_a_new_order_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    def note(model: Any, prompts: Any, k: Any, tokens: int) -> Running:
        for turn in range(3):
            order.append(k)
            yield (turn + 1) / 4
        return Run(1, 1.0, [(0, 0)], [[1]])

    monkeypatch.setattr(module, "begin", note)
    sweep(random_model(), Plan({"a": [[1]]}, rows=(1,), ks=(0, 1, 2, 3), repeats=4))
    turns = [order[i : i + 4] for i in range(0, len(order), 4)]
    assert len(turns) == 5 * 3
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    assert len(set(map(tuple, turns))) > 1


@pytest.mark.parametrize(("ended_in", "kept"), [(11, None), (12, 2), (15, 2), (16, 3)])
def test_whole_repeats_are_kept_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, ended_in: int, kept: int | None
) -> None:
    count = iter(range(100))

    def begin(model: Any, prompts: Any, k: Any, tokens: int) -> Running:
        if next(count) == ended_in:
            raise KeyboardInterrupt
        yield 0.5
        return Run(1, 1.0, [(0, 0)], [[1]])

    monkeypatch.setattr(module, "begin", begin)
    plan = Plan({"a": [[1]]}, rows=(1,), ks=(0, 1, 2, 3), repeats=4)  # four runs warm up
    if kept is None:
        with pytest.raises(KeyboardInterrupt):
            sweep(random_model(), plan)
    else:
        runs = sweep(random_model(), plan)
        assert {len(done) for done in runs[Cell("a", 1)].values()} == {kept}


def test_an_imposed_acceptance_is_followed() -> None:
    plan = Plan(PROMPTS, rows=(2,), ks=(0, 2), tokens=30, repeats=2, acceptance=(1.0, 1.0))
    for by_k in sweep(random_model(), plan).values():
        assert all(run.tokens > 2.8 * len(run.rounds) for run in by_k[2])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ks": (1, 2)}, "--k must hold 0"),
        ({"repeats": 1}, "--repeats is 1"),
        ({"tokens": 19}, "--tokens is 19; .* give 20 or more"),
        ({"rows": (0, 1)}, "--rows is 0, 1"),
        ({"acceptance": (0.5,), "ks": (0, "auto")}, "leave auto out of --k"),
        ({"acceptance": (0.5,), "ks": (0, 2)}, "--acceptance has 1 positions and --k goes to 2"),
        ({"acceptance": (0.5, 0.7), "ks": (0,)}, "--acceptance 0.5, 0.7"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Plan(PROMPTS, **wrong)


def test_a_model_that_cannot_draft_so_far_is_refused() -> None:
    with pytest.raises(RequestError, match="there is no depth to measure"):
        Plan(PROMPTS).check(random_model(head=False))
    with pytest.raises(RequestError, match="--k goes to 9, and this model drafts at most 8"):
        Plan(PROMPTS, ks=(0, 9)).check(random_model())
