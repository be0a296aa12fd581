"""The stats of an answer add up, and count what was emitted: nothing more, nothing less."""

import random
from itertools import pairwise

import pytest

import headstart.engine.engine
import headstart.engine.pending_step
from fixtures import Answer, collect, generate, mlx_lm_greedy, random_model, random_prompt, submit
from headstart.engine import Engine, Event, Request
from headstart.engine.batch import Batch
from headstart.engine.depth import Plan
from headstart.engine.draft_history import DraftHistory
from headstart.engine.pending_step import PendingStep
from headstart.kernels.cpu.backend import StockCpu
from headstart.models import Model
from headstart.sampling import SamplingParams


def assert_adds_up(answer: Answer, k: int) -> None:
    stats = answer.stats
    assert stats.generation_tokens == len(answer.tokens) == len(answer.origins)
    assert stats.rounds == len(answer.bursts)
    assert all(1 <= len(burst) <= k + 1 for burst in answer.bursts)
    assert len(stats.proposed_by_position) == len(stats.accepted_by_position) <= k
    for counts in (stats.proposed_by_position, stats.accepted_by_position):
        assert all(a >= b for a, b in pairwise(counts))
    assert all(a <= p for a, p in zip(stats.accepted_by_position, stats.proposed_by_position, strict=True))
    assert stats.accepted_draft_tokens <= stats.proposed_draft_tokens <= k * stats.rounds
    assert stats.accepted_draft_tokens == answer.origins.count("draft")
    # Every round says one token of the model's own, unless the end cut it off.
    own = len(answer.origins) - answer.origins.count("draft")
    assert stats.rounds - 1 <= own <= stats.rounds
    if k == 0:
        assert answer.origins == ["plain"] * len(answer.tokens)
    report = stats.as_dict()
    assert report["rounds"] == stats.rounds
    assert report["tokens_per_round"] == stats.tokens_per_round == len(answer.tokens) / stats.rounds


@pytest.mark.parametrize("family", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
def test_stats_add_up_for_every_depth_and_length(family: str) -> None:
    model = random_model(family)
    accepted = 0
    for k in range(9):
        engine = Engine(model)
        handles = [submit(engine, random_prompt(model, 5 + n, n), max_tokens=n, k=k) for n in (1, 2, 7, 25)]
        for n, handle in zip((1, 2, 7, 25), handles, strict=True):
            answer = collect(handle)
            assert_adds_up(answer, k)
            assert (len(answer.tokens), answer.finish_reason) == (n, "length")
            accepted += answer.stats.accepted_draft_tokens
    assert accepted > 50  # some of the bursts were bursts


def test_acceptance_by_position_is_cumulative_where_every_round_could_draft_as_many() -> None:
    """Of the rounds that drafted j tokens; only near the end of an answer do rounds draft fewer."""
    model = random_model("dense")
    answer = generate(model, random_prompt(model, 9), max_tokens=200, k=4)
    shares = answer.stats.acceptance_by_position
    full = answer.stats.proposed_by_position[-1]
    assert full > 10
    assert all(a >= b - 4 / full for a, b in pairwise(shares))


def test_every_token_knows_where_it_came_from() -> None:
    """Drafts first, then a bonus where all of them stood and a correction where one fell."""
    model, k = random_model("dense"), 3
    answer = generate(model, random_prompt(model, 9), max_tokens=60, k=k)
    at = 0
    for burst in answer.bursts[:-1]:
        origins = answer.origins[at : at + len(burst)]
        assert origins[:-1] == ["draft"] * (len(burst) - 1)
        room = min(k, 60 - at - 1)
        assert origins[-1] == ("plain" if not room else "bonus" if len(burst) == room + 1 else "correction")
        at += len(burst)
    assert {"draft", "correction", "bonus"} <= set(answer.origins)


def test_nothing_is_proposed_that_the_limit_would_cut_off() -> None:
    """Acceptance would look worse than it is."""
    model = random_model("dense")
    for limit in (1, 2, 3):
        answer = generate(model, random_prompt(model, 9), max_tokens=limit, k=8)
        assert len(answer.stats.proposed_by_position) <= limit - 1
    assert generate(model, random_prompt(model, 9), max_tokens=1, k=8).origins == ["plain"]


def test_a_sequence_is_counted_by_its_own_depth_in_a_mixed_batch() -> None:
    model = random_model("dense")
    engine = Engine(model)
    handles = [submit(engine, random_prompt(model, 9, k), max_tokens=30, k=k) for k in range(9)]
    for k, handle in enumerate(handles):
        assert_adds_up(collect(handle), k)


def test_no_window_is_wider_than_an_answer_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of one token, as a classifier asks for, pays for no draft."""
    step, widths = headstart.engine.pending_step.step, list[int]()

    def noted(model: Model, batch: Batch, k: int, guide: object, **sources: object) -> object:
        widths.append(k)
        return step(model, batch, k, guide, **sources)  # type: ignore[arg-type]

    monkeypatch.setattr(headstart.engine.pending_step, "step", noted)
    model = random_model("dense")
    for how in ({"k": 8}, {"k": "auto"}):
        widths.clear()
        generate(model, random_prompt(model, 9), max_tokens=1, **how)
        assert set(widths) == {0}
    widths.clear()
    generate(model, random_prompt(model, 9), max_tokens=5, k=8)
    assert widths[0] == 4
    assert widths[-1] < 4


def test_one_who_insists_on_a_depth_does_not_choose_it_for_others() -> None:
    model = random_model("dense")

    class Parked:
        gains = ()
        copy_pool = DraftHistory()

        def plan(self, *known: object) -> Plan:
            return Plan(1)

        def observe(self, *told: object) -> None:
            pass

    engine = Engine(model, depth=Parked())
    leaves_it_open = submit(engine, random_prompt(model, 9), max_tokens=30)
    insists = submit(engine, random_prompt(model, 9), max_tokens=12, k=6)
    assert max(collect(leaves_it_open).stats.depths) == 1
    assert len(collect(insists).tokens) == 12


def test_auto_drafts_by_default_and_plain_decoding_gives_its_reason() -> None:
    model = random_model("dense")
    stats = generate(model, random_prompt(model, 9), max_tokens=30).stats
    assert stats.proposed_draft_tokens > 0
    assert sum(stats.depths.values()) == stats.rounds
    assert (stats.drafter_kind, stats.bypass_reason) == ("native_mtp+copy", None)
    stats = generate(model, random_prompt(model, 9), max_tokens=4, k=0).stats
    assert (stats.drafter_kind, stats.bypass_reason) == (None, "the request asked for no drafts")


def test_a_stop_id_inside_a_burst_cuts_it_there() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 9)
    expected = mlx_lm_greedy(model, prompt, 40)
    inside = 0
    for end in range(1, 30):
        if expected[end] in expected[:end]:
            continue
        answer = generate(model, prompt, max_tokens=40, k=4, stop_ids={expected[end]})
        assert (answer.tokens, answer.finish_reason) == (expected[: end + 1], "stop")
        assert_adds_up(answer, 4)
        inside += answer.origins[-1] == "draft"
    assert inside > 3  # the stop id was an accepted draft, and drafts after it were cut off


def test_a_surplus_round_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host learns of an end one step late: the step in flight has the ended sequence in it."""
    launched: list[int] = []
    step = headstart.engine.pending_step.step

    def counted(model, batch, k, *rest, **sources):  # type: ignore[no-untyped-def]
        launched.append(batch.size)
        return step(model, batch, k, *rest, **sources)

    monkeypatch.setattr(headstart.engine.pending_step, "step", counted)
    model = random_model("dense")
    prompt = random_prompt(model, 9)
    expected = mlx_lm_greedy(model, prompt, 40)
    end = next(i for i in range(6, 40) if expected[i] not in expected[:i])
    answer = generate(model, prompt, max_tokens=40, k=0, stop_ids={expected[end]})
    assert (answer.tokens, answer.stats.rounds) == (expected[: end + 1], end + 1)
    assert sum(launched) == end + 2  # one more than was told

    launched.clear()
    answer = generate(model, prompt, max_tokens=10, k=0)
    assert answer.stats.rounds == sum(launched) == 10  # an end by length is foreseen


def test_on_a_cpu_a_step_is_built_but_not_started_until_the_last_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU finishes a step before it accepts another: a step started ahead would be noticed only when the next one
    is over, and the next one's time credited to its depth."""
    model, order = random_model("dense"), list[str]()
    build, prompts = headstart.engine.engine.build_step, [random_prompt(model, 5 + i, i) for i in range(3)]
    alone = [generate(model, prompt, max_tokens=12, k=2).tokens for prompt in prompts]  # started ahead

    def built(*arguments, **options):  # type: ignore[no-untyped-def]
        order.append("built")
        return build(*arguments, **options)

    def started(pending: PendingStep) -> None:
        order.append("started")
        start(pending)

    start = PendingStep.start
    monkeypatch.setattr(headstart.engine.engine, "build_step", built)
    monkeypatch.setattr(PendingStep, "start", started)
    monkeypatch.setattr(StockCpu, "asynchronous", False)
    engine, heard = Engine(model), [list[int]() for _ in prompts]
    for prompt, tokens in zip(prompts, heard, strict=True):

        def listen(event: Event, tokens: list[int] = tokens) -> None:
            tokens += event.tokens
            if order[-1] != "emitted":
                order.append("emitted")

        engine.submit(Request(prompt, SamplingParams(max_tokens=12, k=2)), listener=listen)
    while engine.run_once():
        pass
    assert heard == alone
    line = " ".join(order)
    assert "started started" not in line.replace("built ", "")
    assert "started built emitted started" in line  # the same sequences: built while the last one runs
    assert "started emitted built started" in line  # a sequence comes, or is known to end


def test_on_a_cpu_what_was_built_for_a_sequence_that_ended_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, started = random_model("dense"), list[int](range(3, 12)), list[int]()
    expected = mlx_lm_greedy(model, prompt, 40)
    end = next(i for i in range(6, 40) if expected[i] not in expected[:i])
    start = PendingStep.start
    monkeypatch.setattr(StockCpu, "asynchronous", False)
    monkeypatch.setattr(PendingStep, "start", lambda pending: started.append(1) or start(pending))
    answer = generate(model, prompt, max_tokens=40, k=0, stop_ids={expected[end]})
    assert answer.tokens == expected[: end + 1]
    assert sum(started) == answer.stats.rounds == end + 1


def test_the_engine_can_be_used_again_after_everything_ended() -> None:
    model, rng = random_model("dense"), random.Random(0)
    engine = Engine(model, max_sequences=3)
    prompt = random_prompt(model, 9)
    expected = mlx_lm_greedy(model, prompt, 12)
    for _ in range(4):
        handles = [submit(engine, prompt, max_tokens=12, k=rng.randint(0, 8)) for _ in range(4)]
        handles[rng.randrange(4)].cancel()
        answers = [collect(handle) for handle in handles]
        assert sum(answer.tokens == expected for answer in answers) == 3
        while engine.run_once():
            pass
        assert engine.scheduler.running.batch is None
        assert engine.scheduler.running.pending is None
        assert not engine.scheduler.running.sequences
