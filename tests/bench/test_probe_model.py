"""Answers that are not those of plain decoding are found, shown, and excused only where rounding explains them. A
head whose drafts are mostly rejected fails."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from fixtures import random_model, random_prompt
from headstart.bench.probe import (
    NEAR_TIE,
    DepthResult,
    Divergence,
    ProbeResult,
    find_divergences,
    probe_model,
    probe_prompts,
)
from headstart.bench.probe_report import ProbeReport
from headstart.bench.prompts import KINDS, builtin_prompts
from headstart.bench.system import system_info
from headstart.checkpoint import load_tokenizer, resolve
from headstart.engine.invariance import is_batch_invariant
from headstart.models import Model
from headstart.state import BatchState

TOKENS = 24


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


def depth(k: int | str, tokens: int = 6, rounds: int = 1, seconds: float = 1.0, **drafts: list[int]) -> DepthResult:
    counts = {"proposed": [100, 100], "accepted": [80, 60]} | drafts
    answers = [[1] * 6] * 2
    return DepthResult(k, answers, tokens / seconds, tokens / rounds, seconds / rounds, **counts)  # type: ignore[arg-type]


DEPTHS = [depth(0, rounds=6, seconds=0.6), depth(1, rounds=4, seconds=0.5), depth(2, rounds=3, seconds=0.57)]


def probed(*divergences: Divergence, exact: bool = True, depths: list[DepthResult] = DEPTHS) -> ProbeResult:
    return ProbeResult(exact, [*depths, depth("auto")], list(divergences))


def report(found: ProbeResult) -> ProbeReport:
    return ProbeReport({"id": "a-model"}, system_info(), found, load_tokenizer(resolve(None)), "the remedy")


def at(margin: float | None) -> Divergence:
    return Divergence(2, prompt="chat", position=1, plain=5, drafted=9, margin=margin)


def test_every_depth_of_a_real_model_is_identical_and_timed() -> None:
    model = random_model("dense")
    doing: list[str] = []
    texts = {f"text {n}": random_prompt(model, 6 + n, n) for n in range(3)}
    found = probe_model(model, texts, 2, TOKENS, doing.append)
    assert (found.exact, found.divergences) == (True, [])
    assert [each.k for each in found.depths] == [0, 1, 2, "auto"]
    assert all(each.answers == found.depths[0].answers for each in found.depths)
    assert all(len(answer) == TOKENS for answer in found.depths[0].answers)
    assert all(each.tokens_per_second > 0 and each.step_seconds > 0 for each in found.depths)
    assert len(doing) == 4 * (1 + 3)  # once to warm up
    assert doing[4] == "text 0, k=0"


def test_a_divergence_has_its_position_its_tokens_and_how_far_apart_their_logits_are() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 6, 1)
    plain = probe_model(model, {"code": prompt}, 1, TOKENS, lambda doing: None).depths[0]
    answer = plain.answers[0]
    other = (answer[3] + 1) % model.vocabulary
    drafted = replace(plain, k=2, answers=[[*answer[:3], other, *answer[4:]]])
    (found,) = find_divergences(model, {"code": prompt}, [plain, drafted])
    assert (found.k, found.prompt, found.position) == (2, "code", 3)
    assert (found.plain, found.drafted) == (answer[3], other)
    assert found.margin is None or found.margin > 0  # the model prefers its own token


def test_the_first_divergence_is_reported_with_the_text_of_its_tokens() -> None:
    found = probed(at(0.375), at(2.0))
    assert not found.passed
    tokenizer = load_tokenizer(resolve(None))
    first = json.loads(json.dumps(report(found).as_dict()))["first_divergence"]
    assert (first["prompt"], first["k"], first["margin"], first["rounding"]) == ("chat", 2, 0.375, False)
    assert (first["plain"], first["drafted"]) == (tokenizer.decode([5]), tokenizer.decode([9]))
    (sentence,) = [line for line in report(found).conclusions() if "differ" in line]
    assert (
        "2 of 6 answers differ from plain decoding. The first: k = 2, after the chat prompt, token 2 is" in sentence
    )
    assert sentence.endswith(": a mistake.")
    assert "| 2    | 0 of 2 " in report(found).markdown()


def test_a_near_tie_is_excused_only_where_the_same_tokens_are_not_promised() -> None:
    assert not probed(at(0.1)).passed
    assert probed(at(0.5), at(-0.5), exact=False).passed
    assert not probed(at(0.1), at(NEAR_TIE + 0.01), exact=False).passed
    assert not probed(at(None), exact=False).passed
    excused = report(probed(at(0.1), exact=False))
    assert "- The same tokens are not promised: " in excused.markdown()
    (sentence,) = [line for line in excused.conclusions() if "answers differ" in line]
    assert sentence.endswith(": a near-tie that rounding decides.")


def test_kernels_that_round_by_the_number_of_rows_are_recognised_and_their_near_ties_excused() -> None:
    model = rounding_model()
    assert not is_batch_invariant(model)
    texts = {f"text {n}": random_prompt(model, 6 + n, n) for n in range(8)}
    found = probe_model(model, texts, 2, TOKENS, lambda doing: None)
    assert not found.exact
    assert found.divergences  # else nothing is shown here
    assert all(map(found.is_rounding, found.divergences))
    assert not any(map(replace(found, exact=True).is_rounding, found.divergences))


def test_a_head_that_mostly_drafts_wrong_fails_though_every_answer_is_right() -> None:
    def with_first_drafts(accepted: int) -> ProbeResult:
        return probed(depths=[DEPTHS[0], depth(1, proposed=[121], accepted=[accepted]), DEPTHS[2]])

    assert probed().passed
    assert with_first_drafts(59).passed  # 49 %, which may be chance
    broken = with_first_drafts(40)
    assert not broken.passed
    text = report(broken).markdown()
    assert "33% of 121 first drafts are accepted: too few for a sound head. Its weights are damaged or belong" in text
    assert "- the remedy\n" in text
    assert "- the remedy\n" not in report(probed()).markdown()


def test_the_k_that_pays_is_the_one_with_most_tokens_a_second() -> None:
    found = probed()
    assert found.best.k == 1
    assert "Speculation pays here: k = 1 is 1.20× as fast as no drafts." in report(found).markdown()
    slow = [DEPTHS[0], *(replace(each, tokens_per_second=9.9) for each in DEPTHS[1:])]
    text = report(probed(depths=slow)).markdown()
    assert "Speculation does not pay here: no depth is faster than decoding without drafts." in text
    shown = report(found).as_dict()
    assert shown["cost_by_k"]["1"] == pytest.approx({"seconds": 0.125, "ratio": 1.25})
    assert shown["tokens_per_round"] == {"0": 1.0, "1": 1.5, "2": 2.0, "auto": 6.0}
    assert (shown["best_k"], shown["first_draft_acceptance"]) == (1, 0.8)


def test_acceptance_of_positions_that_were_hardly_tried_is_not_shown() -> None:
    drafted = depth(2, proposed=[20, 9], accepted=[15, 9])
    text = report(probed(depths=[*DEPTHS[:2], drafted])).markdown()
    assert "Accepted by position at k = 2, together with all before it: 75%.\n" in text


def test_the_shortest_prompt_of_each_kind_is_decoded() -> None:
    tokenizer = load_tokenizer(resolve(None))
    prompts = probe_prompts(tokenizer)
    assert list(prompts) == list(KINDS)
    assert len(prompts["code"]) == min(len(each.tokens(tokenizer)) for each in builtin_prompts(["code"]))
