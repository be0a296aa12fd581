"""One run: rows begin together, and only rounds of the full batch are counted."""

import time
from itertools import count

import pytest

from fixtures import mlx_lm_greedy, random_model, random_prompt
from headstart.bench.run import K, Run, Running, begin, in_turns, run
from headstart.engine import Depth, Engine
from headstart.errors import HeadstartError, RequestError

PROMPTS = [random_prompt(random_model(), length, seed=length) for length in (4, 600, 2)]


@pytest.mark.parametrize("k", [0, 2, "auto"])
def test_the_texts_are_those_of_plain_decoding(k: int) -> None:
    done = run(random_model(), PROMPTS, k, tokens=12)
    assert done.exact
    assert max(map(len, done.texts)) == 12
    for prompt, text in zip(PROMPTS, done.texts, strict=True):
        assert text == mlx_lm_greedy(random_model(), prompt, 12)[: len(text)]


def test_the_first_round_of_every_row_is_not_counted_and_all_others_are() -> None:
    done = run(random_model(), PROMPTS, 0, tokens=12)
    assert (done.tokens, done.rounds) == (3 * 11, [(0, 0)] * 3 * 11)
    assert done.rate == done.tokens / done.seconds > 0


def test_every_round_says_how_many_drafts_it_had_and_how_many_stood() -> None:
    done = run(random_model(), PROMPTS, 3, tokens=12)
    assert done.tokens == sum(accepted + 1 for accepted, _ in done.rounds)
    # A row near its end allows fewer drafts, and only then.
    assert {proposed for _, proposed in done.rounds[:3]} == {3}
    assert max(proposed for _, proposed in done.rounds) == 3


def test_a_fixed_depth_teaches_the_judged_controller_nothing_and_auto_goes_on_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Depth] = []
    monkeypatch.setattr(Depth, "observe", lambda depth, *outcome: told.append(depth))
    shared = Engine(random_model()).depth
    run(random_model(), PROMPTS[:1], 1, tokens=20)
    assert told
    assert shared not in told
    run(random_model(), PROMPTS[:1], "auto", tokens=20)
    assert told[-1] is shared


def test_runs_that_take_turns_say_the_same_and_count_their_own_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.bench.run.TURN", 0.0)  # one step each
    ticks, elsewhere = count(time.perf_counter() + 1e3), list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) + sum(elsewhere))
    depth = Engine(random_model()).depth
    steps: list[float] = []
    monkeypatch.setattr(Depth, "observe", lambda self, *told: steps.append(told[-1] or 0) if self is depth else None)
    turns: list[float] = []
    running: dict[K, Running] = {k: begin(random_model(), PROMPTS, k, tokens=12) for k in (0, 2, "auto")}
    running[7] = _slow(elsewhere)
    done = in_turns(running, turns.append)
    assert sum(turns) == pytest.approx(4)
    assert len(turns) > 20
    assert sum(done[k].seconds for k in (0, 2, "auto")) < min(elsewhere)
    assert max(steps) < min(elsewhere)  # nor does the controller take others' turns for its step's
    for k in (0, 2, "auto"):
        for text, plain in zip(done[k].texts, done[0].texts, strict=True):
            assert text == plain[: len(text)]


def _slow(elsewhere: list[float]) -> Running:
    for turn in range(5):
        elsewhere.append(1e9)
        yield turn / 6
    return Run(1, 1.0, [(0, 0)], [[1]])


def test_a_prompt_that_cannot_be_taken_in_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("headstart.engine.intake.prefill", fail)
    with pytest.raises(HeadstartError, match="ValueError: no"):
        run(random_model(), PROMPTS, 0, tokens=12)


def test_too_few_tokens_to_time_are_refused() -> None:
    with pytest.raises(RequestError, match="--tokens 1 are over before they can be timed"):
        run(random_model(), PROMPTS[:1], 0, tokens=1)
