"""Answers that are not those of plain decoding are found, shown, and excused only where rounding explains them."""

import json
from dataclasses import replace
from math import inf

import mlx.core as mx
import pytest

from fixtures import random_model, random_prompt
from headstart.bench import probe
from headstart.bench.head_faults import Fault, run_trunk
from headstart.bench.plan import Trial
from headstart.bench.probe import (
    FEWEST_TOKENS,
    LARGEST_NEAR_TIE,
    DepthRun,
    Divergence,
    ProbeResult,
    decode_prompts,
    find_divergences,
    largest_shift,
    probe_model,
    probe_steps,
    time_depths,
)
from headstart.bench.probe_report import ProbeReport
from headstart.bench.system import system_info
from headstart.checkpoint import load_tokenizer, resolve
from headstart.engine.invariance import is_batch_invariant
from headstart.engine.stats import Stats
from headstart.errors import RequestError
from headstart.models import Model
from headstart.state import BatchState

TOKENS = 24
ACCEPTED = [True] * 97 + [False] * 24


class RoundsByWidth(Model):
    """Its kernels round differently, by up to `NOISE`, where they compute more than one token at a time."""

    NOISE = 0.2

    def trunk(self, tokens: mx.array, rows: BatchState, certain: int) -> mx.array:
        hidden = super().trunk(tokens, rows, certain)
        noise = mx.random.uniform(-self.NOISE, self.NOISE, hidden.shape[-1:], key=mx.random.key(tokens.shape[1]))
        return hidden + noise if tokens.shape[1] > 1 else hidden


def rounding_model() -> Model:
    model = random_model("dense")
    return RoundsByWidth(model.family, model.config, model.lm, model.weights)


def run_of(k: int | str, tokens: int = 6, rounds: int = 1, **stats: list[int]) -> DepthRun:
    counted = Stats(None, None, generation_tokens=tokens, rounds=rounds, **stats)  # type: ignore[arg-type]
    return DepthRun(k, [[1] * tokens] * 2, counted, [])  # type: ignore[arg-type]


RUNS = [run_of(0, rounds=6), run_of(1, rounds=4), run_of(2, rounds=3), run_of("auto")]


def probed(*divergences: Divergence, exact: bool = True, rounding: float = 0.0, **more: object) -> ProbeResult:
    prompts = ["prompt 0", "prompt 1"]
    found = ProbeResult(prompts, exact, RUNS, list(divergences), rounding, ACCEPTED, [], [0.1, 0.125, 0.19])
    return replace(found, **more)  # type: ignore[arg-type]


def report(found: ProbeResult) -> ProbeReport:
    return ProbeReport({"id": "a-model"}, system_info(), found, load_tokenizer(resolve(None)), "the remedy")


def at(margin: float, drafted: int | None = 9) -> Divergence:
    return Divergence(2, prompt=1, position=1, plain=5, drafted=drafted, margin=margin)


def test_every_depth_of_a_real_model_is_identical() -> None:
    model = random_model("dense")
    prompts = [random_prompt(model, 6 + n, n) for n in range(3)]
    runs = [decode_prompts(model, None, prompts, k, TOKENS) for k in (0, 1, 3, "auto")]
    assert all(len(answer) == TOKENS for answer in runs[0].answers)
    texts = [run_trunk(model, prompt, answer) for prompt, answer in zip(prompts, runs[0].answers, strict=True)]
    assert find_divergences(model, texts, runs) == []
    # Over all tokens in one pass, the logits are the same; log-probabilities round a little.
    assert max(largest_shift(model, *pair) for pair in zip(texts, runs[0].likeliest, strict=True)) < 1e-5


def test_a_divergence_has_its_position_its_tokens_and_how_far_apart_their_logits_are() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 6, 1)
    plain = decode_prompts(model, None, [prompt], 0, 8)
    answer = plain.answers[0]
    other = (answer[3] + 1) % model.vocabulary
    drafted = DepthRun(2, [[*answer[:3], other, *answer[4:]]], plain.stats, [])
    (found,) = find_divergences(model, [run_trunk(model, prompt, answer)], [plain, drafted])
    assert (found.k, found.prompt, found.position, found.plain, found.drafted) == (2, 0, 3, answer[3], other)
    assert 0 < found.margin < inf  # the model prefers its own token


def test_an_answer_that_ends_early_is_a_divergence_that_no_rounding_excuses() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 6, 1)
    plain = decode_prompts(model, None, [prompt], 0, 8)
    shorter = DepthRun(1, [plain.answers[0][:5]], plain.stats, [])
    (found,) = find_divergences(model, [run_trunk(model, prompt, plain.answers[0])], [plain, shorter])
    assert (found.position, found.drafted, found.margin) == (5, None, inf)
    assert not probed(found, exact=False, rounding=1.0).passed


def test_the_first_divergence_is_reported_with_its_prompt_and_the_text_of_its_tokens() -> None:
    found = probed(at(0.375))
    assert not found.passed
    tokenizer = load_tokenizer(resolve(None))
    first = report(found).as_dict()["first_divergence"]
    assert first["prompt"] == "prompt 1"
    assert first["plain"] == {"id": 5, "text": tokenizer.decode([5])}
    assert first["drafted"] == {"id": 9, "text": tokenizer.decode([9])}
    (sentence,) = [line for line in report(found).conclusions() if "differ" in line]
    assert "1 of 6 answers differ from plain decoding. The first: k = 2, after 'prompt 1', token 2 of" in sentence
    assert "their logits are 0.375 apart, a mistake." in sentence


def test_a_near_tie_is_excused_only_where_the_same_tokens_are_not_promised() -> None:
    assert not probed(at(0.1), rounding=0.25).passed
    assert probed(at(0.5), at(-0.5), exact=False, rounding=0.25).passed
    assert not probed(at(0.1), at(0.5), exact=False, rounding=0.24).passed
    assert not probed(at(LARGEST_NEAR_TIE + 0.01), exact=False, rounding=9.0).passed
    excused = report(probed(at(0.1), exact=False, rounding=0.25))
    assert "may decide between tokens whose logits are less than 0.5 apart." in excused.markdown()
    (sentence,) = [line for line in excused.conclusions() if "answers differ" in line]
    assert sentence.endswith("their logits are 0.1 apart, a near-tie that rounding decides.")


def test_an_infinite_margin_is_null_in_json() -> None:
    found = probed(at(inf, drafted=None), exact=False, rounding=9.0)
    first = json.loads(json.dumps(report(found).as_dict(), allow_nan=False))["first_divergence"]
    assert (first["drafted"], first["margin"], first["rounding"]) == (None, None, False)
    (sentence,) = [line for line in report(found).conclusions() if "answers differ" in line]
    assert "of the answer is the end instead of" in sentence
    assert sentence.endswith(": a mistake.")


def test_unless_given_depths_to_three_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "TIMED_TOKENS", 12)
    tokenizer = load_tokenizer(resolve(None))
    model = replace(random_model("dense", vocab_size=len(tokenizer)), max_k=5)
    steps: list[str] = []
    found = probe_model(model, tokenizer, tokens=FEWEST_TOKENS, progress=steps.append)
    assert [run.k for run in found.runs] == [0, 1, 2, 3, "auto"]
    assert len(found.tokens_per_second) == len(found.step_seconds) == 4
    assert min(found.step_seconds) > 0
    assert len(steps) == probe_steps(3)


def test_kernels_that_round_by_the_number_of_rows_are_recognised_and_their_near_ties_excused() -> None:
    model = rounding_model()
    assert not is_batch_invariant(model)
    prompts = [random_prompt(model, 6 + n, n) for n in range(8)]
    runs = [decode_prompts(model, None, prompts, k, TOKENS) for k in (0, 2, 5)]
    texts = [run_trunk(model, prompt, answer) for prompt, answer in zip(prompts, runs[0].answers, strict=True)]
    found = find_divergences(model, texts, runs)
    assert found  # else nothing is shown here
    rounding = max(largest_shift(model, *pair) for pair in zip(texts, runs[0].likeliest, strict=True))
    assert rounding > 0
    assert probed(*found, exact=False, rounding=rounding).passed
    assert not probed(*found, exact=True, rounding=rounding).passed


def test_a_machine_that_slows_down_does_not_change_the_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(1000))

    def decode(model: Model, prompts: object, k: int, tokens: int) -> Trial:
        return Trial(1, (10 + 5 * k) * (1 + next(runs) // 3), 1.0)  # slower in every repeat of three depths

    monkeypatch.setattr(probe, "decode_batch", decode)
    times = time_depths(random_model(), [1, 2], 2)
    assert [seconds / times[0] for seconds in times] == [1.0, 1.5, 2.0]


def test_a_collapsed_head_or_a_fault_fails_though_every_answer_is_right() -> None:
    assert probed().passed
    assert probed(first_drafts=[True] * 59 + [False] * 62).passed  # 49 %, which may be chance
    assert not probed(first_drafts=[True] * 40 + [False] * 81).passed
    assert not probed(faults=[Fault("pre_norm_feed", "the head", 0.7, 0.85)]).passed


def test_the_k_that_pays_is_the_one_with_most_tokens_a_second() -> None:
    found = probed()
    assert found.tokens_per_second == pytest.approx([10.0, 12.0, 10.526], rel=1e-3)
    assert found.best_k == 1
    assert "Speculation pays here: k = 1 is expected to be 1.20× as fast as no drafts." in report(found).markdown()
    text = report(replace(found, step_seconds=[0.1, 0.2, 0.3])).markdown()
    assert "Speculation does not pay here: no depth is expected to be faster than decoding without drafts." in text


def test_acceptance_of_positions_that_were_hardly_tried_is_not_shown() -> None:
    drafted = run_of(2, proposed_by_position=[20, 9], accepted_by_position=[15, 9])
    text = report(probed(runs=[RUNS[0], RUNS[1], drafted, RUNS[3]])).markdown()
    assert "Accepted by position at k = 2, together with all before it: 75%.\n" in text


@pytest.mark.parametrize(
    ("wrong", "message"), [({"k": 9}, "1 to 8"), ({"k": 0}, "draft 1 to"), ({"tokens": 3}, "16")]
)
def test_what_cannot_be_probed_is_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        probe_model(random_model("dense"), load_tokenizer(resolve(None)), **wrong)
