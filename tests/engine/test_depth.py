"""The choice of depth, on machines and texts made of numbers (`simulator.py`), and in the running engine."""

import statistics
from collections.abc import Sequence
from itertools import product

import pytest
from simulator import MACHINES, TEXTS, Informed, Text, mean_share, simulate

import headstart.engine.engine
from fixtures import FAMILIES, builtin_model, collect, generate, random_model, random_prompt, submit
from headstart.engine import Depth, Engine
from headstart.engine.calibrate import step_times
from headstart.engine.cost import Cost
from headstart.engine.depth import Drafter
from headstart.models import Model

EVERY = [(machine, text) for machine, text in product(MACHINES, TEXTS) if machine != "drifting"]


@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_depth_earns_what_the_best_choice_would_on_every_machine_and_text(rows: int) -> None:
    """The best choice knows every chance and cost, and when they change; this one measures them, through noise and
    hiccups. Over 600 rounds, what it spends on finding out included."""
    shares = {(machine, text): mean_share(machine, text, rows=rows) for machine, text in EVERY}
    assert min(shares.values()) >= 0.95, shares


@pytest.mark.parametrize("rows", [1, 4])
def test_a_price_of_drafts_that_rises_is_followed(rows: int) -> None:
    """From a tenth of a step to more than a whole one, within 600 rounds. Only looks at other depths tell that from a
    machine that slows down, and they cost more and more where the text is poor."""
    shares = {text: mean_share("drifting", text, rows=rows) for text in TEXTS}
    assert min(shares.values()) >= 0.9, shares


@pytest.mark.slow
def test_other_work_on_the_machine_does_not_mislead_it() -> None:
    """Steps take up to twice as long for a while, and every clock is off by an eighth."""
    shares = {(machine, text): mean_share(machine, text, busy=True) for machine, text in EVERY}
    assert min(shares.values()) >= 0.93, shares
    assert statistics.mean(shares.values()) >= 0.95


def test_texts_that_take_turns_are_followed_as_well_as_can_be() -> None:
    """Every 100 rounds the other one: part of what the best choice earns is out of reach of whoever must notice."""
    text: Text = lambda round, j: 0.9 if round // 100 % 2 else 0.3  # noqa: E731
    for machine in ("flat", "linear", "cpu", "step at 8"):
        costs = MACHINES[machine]
        ours = statistics.mean(simulate(costs, text, 600, seed=s).share() for s in range(8))
        told = [simulate(costs, text, 600, seed=s, controller=Informed(costs, (0.3, 0.9), 100)) for s in range(8)]
        assert ours >= 0.95 * statistics.mean(run.share() for run in told), machine


@pytest.mark.parametrize("machine", MACHINES)
def test_depth_converges_within_30_rounds(machine: str) -> None:
    for text in ("good", "falling", "poor"):
        runs = [simulate(MACHINES[machine], TEXTS[text], 80, seed=seed) for seed in range(16)]
        shares = [run.share(30) for run in runs]
        assert statistics.mean(shares) >= 0.95, text
        assert min(shares) >= 0.85, text  # whatever the luck


@pytest.mark.parametrize("machine", MACHINES)
def test_depth_is_found_again_within_50_rounds_of_a_burst(machine: str) -> None:
    rows = lambda round: 8 if 300 <= round < 400 else 1  # noqa: E731
    runs = [simulate(MACHINES[machine], TEXTS["falling"], 520, rows=rows, seed=seed) for seed in range(8)]
    shares = [run.share(450) for run in runs]
    assert statistics.mean(shares) >= (0.93 if machine == "drifting" else 0.95)  # a share is less there
    assert min(shares) >= 0.85
    assert statistics.mean(run.share(300, 450) for run in runs) >= 0.9  # the burst and what follows it


def test_depth_parks_where_drafts_lose_and_comes_back_when_they_win() -> None:
    runs = [simulate(MACHINES["cpu"], TEXTS["poor, then good"], 600, seed=seed) for seed in range(8)]
    assert statistics.mean(k > 0 for run in runs for k in run.depths[100:300]) < 0.2
    assert statistics.mean(k > 0 for run in runs for k in run.depths[350:]) > 0.8


def test_what_was_measured_with_some_rows_says_what_others_cost() -> None:
    def seconds(rows: int, k: int) -> float:
        return 0.7 + 0.1 * rows + 0.03 * rows * (k + 1) + 0.05 * k

    cost = Cost()
    cost.calibrate({(rows, k): [seconds(rows, k)] for rows in (1, 3) for k in (0, 1, 3, 7)})
    for rows in (2, 4):
        assert cost.curve(rows, 7) == pytest.approx([seconds(rows, k) for k in range(8)], rel=0.05)


def test_a_slow_spell_is_the_machines_and_not_the_depths() -> None:
    cost = Cost()
    cost.calibrate({(1, 0): [1.0], (1, 1): [1.5], (1, 3): [2.5]})
    before = cost.curve(1, 3)
    for seconds in [2.5] * 20 + [5.0] * 20:
        cost.observe(1, 3, seconds)
    after = cost.curve(1, 3)
    assert after[3] == pytest.approx(5.0, rel=0.1)
    assert after[0] / after[3] == pytest.approx(before[0] / before[3], rel=0.15)


def test_one_hiccup_does_not_rule_a_depth_out() -> None:
    """Not even if it is all that was seen of the depth."""
    cost = Cost()
    cost.calibrate({(1, 0): [1.0], (1, 1): [1.5], (1, 3): [2.5]})
    for seconds in (2.0, 20.0):
        cost.observe(1, 2, seconds)
    assert cost.curve(1, 2)[2] < 4.0


def test_where_it_costs_to_begin_drafts_are_looked_at_more_seldom() -> None:
    """The head must then be shown what it has missed. Drafts lose a little here, so it stays at zero."""

    def looks(beginning: float) -> int:
        depth, row, begun, last = Depth(), Drafter(1), 0, 0
        depth.cost.calibrate({(1, 0): [1.0], (1, 1): [1.82]})
        for round in range(1500):
            k = depth.choose([row])
            first = k > last
            stands = round % 5 != 0
            depth.observe([row], k, [(k * stands, k)], 1 + 0.82 * k + beginning * first)
            begun, last = begun + first, k
        return begun

    assert looks(0.0) > 1.5 * looks(1.0) > 0


def play(depth: Depth, rows: list[Drafter], rounds: int, stands: bool, timed: bool = True) -> list[int]:
    """Rounds in which every draft stands or none does, on a machine where a draft costs .8 of a step."""
    depths = []
    for _ in range(rounds):
        k = depth.choose(rows)
        seconds = len(rows) * (1 + 0.8 * k)
        depth.observe(rows, k, [(k * stands, k)] * len(rows), seconds if timed else None)
        depths.append(k)
    return depths


def parked() -> Depth:
    """One that knows the machine, and drafts nothing, since nothing stood for long."""
    depth = Depth()
    depth.cost.calibrate({(1, k): [1 + 0.8 * k] * 2 for k in (0, 1, 3, 7)})
    assert play(depth, [Drafter(8)], 300, stands=False)[-8:].count(0) >= 6
    return depth


def test_a_new_text_is_tried_at_once_and_drafts_that_pay_go_on() -> None:
    """Other rows' texts say little of it. Where the first drafts stand there is no going back to zero."""
    depths = play(parked(), [Drafter(8)], 30, stands=True)
    first = depths.index(max(depths[:6], key=bool))
    assert first < 6
    assert 0 not in depths[first:]
    assert play(parked(), [Drafter(8)], 30, stands=False).count(0) >= 24


def test_no_look_begins_while_steps_cannot_be_timed() -> None:
    """Rows are coming in then, and wait for the steps of those that run."""
    depth = parked()
    play(depth, [Drafter(8)], 8, stands=False)
    assert not any(play(depth, [Drafter(8)], 200, stands=False, timed=False)[5:])
    assert any(play(depth, [Drafter(8)], 200, stands=False))


def test_a_number_of_rows_that_is_only_passed_through_is_not_looked_into() -> None:
    depth = parked()
    for rows in range(2, 17):
        assert not any(play(depth, [Drafter(8) for _ in range(rows)], 2, stands=False, timed=rows % 2 == 0)[:1])


def test_one_look_does_not_outweigh_many() -> None:
    """The machine was slower while the others ran, so drafts seemed cheaper than they are."""
    cost = Cost()
    cost.calibrate({(1, 0): [1.0], (1, 1): [1.8]})
    for look in range(12):
        for k in (0,) * 30 + (1,) * 3:
            cost.observe(1, k, (1 + 0.8 * k) * (0.7 if look == 11 and k else 1.0))
    plain, drafted = cost.curve(1, 1)
    assert drafted / plain > 1.65


@pytest.mark.parametrize("k", [0, "auto"])
def test_a_round_that_nobody_waits_for_any_more_teaches_nothing(k: object) -> None:
    """The only row is cancelled with a round in flight, and another comes in the same turn."""
    model = random_model("dense")
    prompt = random_prompt(model, 9)
    expected = generate(model, prompt, max_tokens=8, k=0).tokens
    engine = Engine(model, depth=Depth())
    for _ in range(6):
        gone = submit(engine, prompt, max_tokens=40, k=k)
        for _ in range(4):
            engine.turn()
        gone.cancel()
        assert collect(submit(engine, prompt, max_tokens=8, k=k)).tokens == expected
    Depth().observe([], 0, [], None)


def test_no_row_is_drafted_for_beyond_its_ceiling() -> None:
    depth = Depth()
    assert all(depth.choose([Drafter(0), Drafter(0)]) == 0 for _ in range(30))
    assert all(depth.choose([Drafter(2), Drafter(0)]) <= 2 for _ in range(30))
    depth = Depth(most=3)
    assert max(depth.choose([Drafter(8)]) for _ in range(30)) <= 3
    assert len(depth.gains) == 4


@pytest.mark.parametrize("family", ["dense", "moe", "next"])
def test_greedy_and_seeded_output_is_that_of_plain_decoding(family: str) -> None:
    model, tried = random_model(family), 0
    for params in ({}, {"temperature": 0.8, "seed": 5}):
        prompt = random_prompt(model, 13)
        plain = generate(model, prompt, max_tokens=80, k=0, **params)
        auto = generate(model, prompt, max_tokens=80, **params)
        assert auto.tokens == plain.tokens
        tried += sum(depth > 0 for depth in auto.stats.depths)
    assert tried  # or this shows nothing; which depths they are is up to the clock


def test_the_built_in_model_says_the_same_whatever_depth_is_chosen() -> None:
    model, prompt = builtin_model(), [5, 900, 31, 7]
    assert generate(model, prompt, max_tokens=24).tokens == generate(model, prompt, max_tokens=24, k=0).tokens


class Told:
    """Stands for a controller on another machine."""

    gains = (1.0, 1.25)

    def __init__(self, choices: Sequence[int]):
        self.choices, self.told = iter(choices), list[int]()

    def choose(self, rows: Sequence[Drafter]) -> int:
        return next(self.choices)

    def observe(
        self, rows: Sequence[Drafter], k: int, outcomes: Sequence[tuple[int, int]], seconds: float | None
    ) -> None:
        self.told.append(k)


def test_the_choice_can_be_made_elsewhere() -> None:
    """What one engine's controller chose, another is told: the same steps, the same answer."""
    model, choices = random_model("dense"), [3, 0, 0, 8, 1, 2] * 20
    told = Told(choices)
    answer = collect(submit(Engine(model, depth=told), random_prompt(model, 9), max_tokens=40))
    assert answer.tokens == generate(model, random_prompt(model, 9), max_tokens=40, k=0).tokens
    assert told.told == choices[: len(told.told)]
    assert set(answer.stats.depths) == {0, 1, 2, 3, 8}


@pytest.mark.parametrize(
    "family", ["dense", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "dense")]
)
def test_rows_that_all_leave_the_depth_open_say_what_they_would_say_alone(family: str) -> None:
    model = random_model(family)
    prompts = [random_prompt(model, 5 + 4 * i, i) for i in range(5)]
    how = [{"temperature": 1.0, "seed": i} if i % 2 else {} for i in range(5)]
    for depth in (None, Told([3, 0, 5, 1, 8, 2, 0, 0] * 40)):
        engine = Engine(model, max_rows=4, depth=depth)
        handles = [submit(engine, prompts[i], max_tokens=30 + 3 * i, **how[i]) for i in range(5)]
        answers = [collect(handle) for handle in handles]
        for i, answer in enumerate(answers):
            assert answer.tokens == generate(model, prompts[i], max_tokens=30 + 3 * i, k=0, **how[i]).tokens
        assert len({k for answer in answers for k in answer.stats.depths}) > 1


def test_an_answer_says_what_each_depth_is_believed_to_gain() -> None:
    model = random_model("dense")
    stats = generate(model, random_prompt(model, 9), max_tokens=20).stats
    assert stats.estimated_gain_by_k == stats.as_dict()["estimated_gain_by_k"]
    assert len(stats.estimated_gain_by_k) == model.max_k + 1
    assert stats.estimated_gain_by_k[0] == 1.0
    assert generate(model, random_prompt(model, 9), max_tokens=20, k=3).stats.estimated_gain_by_k == []


def test_steps_are_timed_before_the_first_answer_that_needs_it_and_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[int] = []

    def counted(model: Model, most: int, max_rows: int, enough: float) -> dict[tuple[int, int], list[float]]:
        timed.append(most)
        return step_times(model, most, max_rows, enough)

    monkeypatch.setattr(headstart.engine.engine, "step_times", counted)
    model = random_model("dense", seed=77)
    generate(model, random_prompt(model, 9), max_tokens=4, k=2)
    assert timed == []
    for _ in range(2):
        generate(model, random_prompt(model, 9), max_tokens=4)
    assert timed == [model.max_k]
