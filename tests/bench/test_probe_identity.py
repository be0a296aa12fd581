"""Answers that are not those of plain decoding are found, shown, and excused only where rounding explains them."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from fixtures import random_model, random_prompt
from headstart.bench.faults import DraftCount, Fault
from headstart.bench.identity import GreedyAnswer, GreedyRun, decode_prompts, divergences
from headstart.bench.probe import FEWEST_TOKENS, LARGEST_ROUNDING, ProbeResult, probe_model, probe_steps
from headstart.bench.probe_report import ProbeReport
from headstart.bench.replay import largest_shift, replay
from headstart.bench.step_time import StepTime
from headstart.bench.system import system_info
from headstart.checkpoint import load_tokenizer, resolve
from headstart.engine.invariance import is_batch_invariant
from headstart.engine.request import TokenLogprobs
from headstart.engine.stats import Stats
from headstart.errors import RequestError
from headstart.models import Model
from headstart.state import BatchState

TOKENS = 24


class RoundsByWidth(Model):
    """Its kernels come out differently, by up to `NOISE`, where they work on more than one token at a time."""

    NOISE = 0.2

    def trunk(self, tokens: mx.array, rows: BatchState, certain: int) -> mx.array:
        hidden = super().trunk(tokens, rows, certain)
        noise = mx.random.uniform(-self.NOISE, self.NOISE, hidden.shape[-1:], key=mx.random.key(tokens.shape[1]))
        return hidden + noise if tokens.shape[1] > 1 else hidden


def rounding_model() -> Model:
    model = random_model("dense")
    return RoundsByWidth(model.family, model.config, model.lm, model.weights)


def probed(
    plain: GreedyRun, *runs: GreedyRun, exact: bool = True, rounding: float = 0.0, **more: object
) -> ProbeResult:
    times = [StepTime(run.k, 0.01, 1.0) for run in (plain, *runs) if run.k != "auto"]
    prompts = [f"prompt {number}" for number in range(len(plain.answers))]
    found = ProbeResult(prompts, TOKENS, exact, [plain, *runs], rounding, DraftCount(97, 121), [], times, {})
    return replace(found, **more)  # type: ignore[arg-type]


def report(found: ProbeResult) -> ProbeReport:
    return ProbeReport("a-model", {}, system_info(), found, load_tokenizer(resolve(None)), "the remedy")


def said(*tokens: int, gap: float = 1.0, rounds: int = 1) -> GreedyAnswer:
    """An answer that preferred every token to token 9 by `gap`."""
    told = [TokenLogprobs(-0.5, [(token, -0.5), (9, -0.5 - gap)]) for token in tokens]
    return GreedyAnswer(list(tokens), told, Stats(None, None, generation_tokens=len(tokens), rounds=rounds))


def test_every_depth_of_a_real_model_is_identical() -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, 6 + n, n) for n in range(3)]
    plain, *runs = [decode_prompts(model, None, prompts, k, TOKENS) for k in (0, 1, 3, "auto")]
    assert all(len(answer.tokens) == TOKENS for answer in plain.answers)
    assert [divergences(plain, run) for run in runs] == [[], [], []]
    assert probed(plain, *runs).passed
    texts = [replay(model, prompt, answer.tokens) for prompt, answer in zip(prompts, plain.answers, strict=True)]
    # Read in one pass, the logits are the same; log-probabilities round a little.
    assert max(largest_shift(model, *pair) for pair in zip(texts, plain.answers, strict=True)) < 1e-5


def test_the_first_divergence_is_told_with_prompt_position_tokens_and_gaps() -> None:
    plain = GreedyRun(0, [said(1, 2, 3), said(4, 5, 6, gap=0.25)])
    run = GreedyRun(2, [said(1, 2, 3), GreedyAnswer([4, 9, 6], [], Stats(None, None))])
    run.answers[1].logprobs.extend([TokenLogprobs(-0.1, [(4, -0.1)]), TokenLogprobs(-0.5, [(9, -0.5), (5, -0.625)])])
    found = probed(plain, run, GreedyRun("auto", plain.answers))
    (first,) = found.divergences
    assert (first.k, first.prompt, first.position, first.plain, first.drafted) == (2, 1, 1, 5, 9)
    assert (first.plain_gap, first.drafted_gap, first.shift) == (0.25, 0.125, 0.375)
    assert not found.passed
    tokenizer = load_tokenizer(resolve(None))
    told = report(found).as_dict()["first_divergence"]
    assert told["prompt"] == "prompt 1"
    assert told["plain"] == {"id": 5, "text": tokenizer.decode([5])}
    assert told["drafted"] == {"id": 9, "text": tokenizer.decode([9])}
    (sentence,) = [line for line in report(found).conclusions() if "differ" in line]
    assert "'prompt 1', token 2 of the answer" in sentence
    assert "by 0.25 and 0.125 in logits: a mistake" in sentence


def test_an_answer_that_ends_early_is_a_divergence_that_no_rounding_excuses() -> None:
    plain, run = GreedyRun(0, [said(1, 2, 3)]), GreedyRun(1, [said(1, 2)])
    found = probed(plain, run, GreedyRun("auto", plain.answers), exact=False, rounding=1.0)
    assert [(each.position, each.plain, each.drafted) for each in found.divergences] == [(2, 3, None)]
    assert not found.passed


def test_a_near_tie_is_excused_only_where_the_same_tokens_are_not_promised() -> None:
    plain = GreedyRun(0, [said(1, 2, gap=0.25)])
    other = GreedyRun(1, [said(1, 9)])
    other.answers[0].logprobs[1] = TokenLogprobs(-0.5, [(9, -0.5), (2, -0.75)])  # a shift of 0.5 in all
    auto = GreedyRun("auto", plain.answers)
    assert not probed(plain, other, auto, exact=True, rounding=0.25).passed
    assert probed(plain, other, auto, exact=False, rounding=0.25).passed
    assert not probed(plain, other, auto, exact=False, rounding=0.24).passed
    assert not probed(GreedyRun(0, [said(1, 2, gap=LARGEST_ROUNDING)]), other, auto, exact=False, rounding=9.0).passed


def test_a_token_that_was_not_among_the_likeliest_is_never_excused() -> None:
    """By how much it was worse is not known, only that it was by no less than the last that was kept."""
    plain, other = GreedyRun(0, [said(1, 2, gap=0.01)]), GreedyRun(1, [said(1, 9)])
    other.answers[0].logprobs[1] = TokenLogprobs(-0.5, [(9, -0.5), (3, -0.51)])  # plain decoding's 2 is not told
    found = probed(plain, other, GreedyRun("auto", plain.answers), exact=False, rounding=0.5)
    (first,) = found.divergences
    assert (first.drafted_gap, first.shift) == (None, float("inf"))
    assert not found.passed
    told = json.loads(json.dumps(report(found).as_dict(), allow_nan=False))
    assert told["first_divergence"]["drafted_gap"] is None
    (sentence,) = [line for line in report(found).conclusions() if "answers differ" in line]
    assert "is not among the 8 likeliest of the other: a mistake" in sentence


def test_unless_told_otherwise_depths_to_three_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.bench.step_time.STEPS", 1)
    tokenizer = load_tokenizer(resolve(None))
    model = replace(random_model("dense", vocab_size=len(tokenizer)), max_k=5)
    steps: list[str] = []
    found = probe_model(model, tokenizer, tokens=FEWEST_TOKENS, progress=steps.append)
    assert [run.k for run in found.runs] == [0, 1, 2, 3, "auto"]
    assert found.tokens_per_second.keys() == {0, 1, 2, 3}
    assert len(steps) == probe_steps(3)


def test_kernels_that_round_by_the_number_of_rows_are_recognised_and_their_near_ties_excused() -> None:
    model = rounding_model()
    assert not is_batch_invariant(model)
    prompts = [random_prompt(model, 6 + n, n) for n in range(8)]
    plain, *runs = [decode_prompts(model, None, prompts, k, TOKENS) for k in (0, 2, 5)]
    found = probed(plain, *runs, exact=False)
    assert found.divergences  # else nothing is shown here
    texts = [replay(model, prompt, answer.tokens) for prompt, answer in zip(prompts, plain.answers, strict=True)]
    rounding = max(largest_shift(model, *pair) for pair in zip(texts, plain.answers, strict=True))
    assert rounding > 0
    assert probed(plain, *runs, exact=False, rounding=rounding).passed


def test_a_collapsed_head_or_a_fault_fails_though_every_answer_is_right() -> None:
    plain = GreedyRun(0, [said(1, 2, 3)])
    runs = (plain, GreedyRun(1, plain.answers), GreedyRun("auto", plain.answers))
    assert probed(*runs).passed
    assert probed(*runs, first_drafts=DraftCount(59, 121)).passed  # 49 %, which may be chance
    assert not probed(*runs, first_drafts=DraftCount(40, 121)).passed
    assert not probed(*runs, faults=[Fault("pre_norm_feed", "the head", 0.7, 0.85)]).passed


def test_the_k_that_pays_is_the_one_with_most_tokens_a_second() -> None:
    runs = [GreedyRun(k, [said(1, 2, 3, 4, 5, 6, rounds=rounds)]) for k, rounds in ((0, 6), (1, 4), (2, 3))]
    times = [StepTime(k, 0.1, ratio) for k, ratio in ((0, 1.0), (1, 1.25), (2, 1.9))]
    found = probed(*runs, GreedyRun("auto", runs[0].answers), step_times=times)
    assert found.tokens_per_second == pytest.approx({0: 10.0, 1: 12.0, 2: 10.526}, rel=1e-3)
    assert found.best_k == 1
    assert "Speculation pays here: k = 1 is expected to be 1.20× as fast as no drafts." in report(found).markdown()
    slow = [StepTime(k, 0.1, 1.0 + k) for k in range(3)]
    text = report(replace(found, step_times=slow)).markdown()
    assert "Speculation does not pay here: no depth is expected to be faster than decoding without drafts." in text


def test_acceptance_of_positions_that_were_hardly_tried_is_not_shown() -> None:
    stats = Stats(
        None, None, proposed_by_position=[20, 9], accepted_by_position=[15, 9], generation_tokens=3, rounds=1
    )
    plain = GreedyRun(0, [said(1, 2, 3)])
    drafted = GreedyRun(2, [GreedyAnswer([1, 2, 3], plain.answers[0].logprobs, stats)])
    text = report(probed(plain, drafted, GreedyRun("auto", plain.answers))).markdown()
    assert "Accepted by position at k = 2, together with all before it: 75%.\n" in text


@pytest.mark.parametrize(
    ("asked", "message"), [({"k": 9}, "1 to 8"), ({"k": 0}, "draft 1 to"), ({"tokens": 3}, "16")]
)
def test_what_cannot_be_probed_is_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        probe_model(random_model("dense"), load_tokenizer(resolve(None)), **asked)  # type: ignore[arg-type]
