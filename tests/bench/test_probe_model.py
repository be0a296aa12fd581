"""Answers that are not those of plain decoding are found, shown, and excused only where rounding explains them. A
head whose drafts are mostly rejected fails."""

import json
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from fixtures import random_model, random_prompt
from headstart.bench.measurement import Trial
from headstart.bench.probe import (
    NEAR_TIE,
    Divergence,
    ProbeReport,
    decode_depths,
    find_divergences,
    is_near_tie,
    probe_prompts,
)
from headstart.bench.prompts import KINDS, builtin_prompts
from headstart.bench.system import system_info
from headstart.checkpoint import load_tokenizer, resolve
from headstart.engine.invariance import is_batch_invariant
from headstart.kernels.cpu.backend import StockCpu
from headstart.models import Model
from headstart.state import BatchState

TOKENS = 24
TOKENIZER = load_tokenizer(resolve(None))


class RoundsByWidth(Model):
    """Its kernels round differently, by up to `NOISE`, where they compute more than one token at a time."""

    NOISE = 0.2

    def trunk(self, tokens: mx.array, state: BatchState, certain: int = 1, **given: Any) -> mx.array:
        hidden = super().trunk(tokens, state, certain, **given)
        noise = mx.random.uniform(-self.NOISE, self.NOISE, hidden.shape[-1:], key=mx.random.key(tokens.shape[1]))
        return hidden + noise if tokens.shape[1] > 1 else hidden


def rounding_model() -> Model:
    model = random_model("dense")
    return RoundsByWidth(model.family, model.config, model.lm, model.weights, backend=StockCpu())


def decoded(rounds: int, seconds: float, proposed: list[int], accepted: list[int]) -> Trial:
    return Trial(6, seconds, 6 / rounds, proposed, accepted, [[1] * 6] * 2)


PLAIN = decoded(6, 0.6, [], [])
ONE = decoded(4, 0.5, [100], [80])
TWO = decoded(3, 0.57, [100, 100], [80, 60])


def probed(*divergences: Divergence, exact: bool = True, one: Trial = ONE, two: Trial = TWO) -> ProbeReport:
    depths = {0: replace(PLAIN, exact=exact), 1: one, 2: two, "auto": TWO}
    return ProbeReport({"id": "a-model"}, system_info(), depths, list(divergences), "the remedy")  # type: ignore[arg-type]


def different(rounding: bool = False) -> Divergence:
    return Divergence(2, prompt="chat", position=1, plain="a", drafted="b", rounding=rounding)


def test_every_depth_of_a_real_model_is_identical_and_timed() -> None:
    model = random_model("dense")
    doing: list[str] = []
    texts = {f"text {n}": random_prompt(model, 6 + n, n) for n in range(3)}
    depths = decode_depths(model, texts, 2, TOKENS, doing.append)
    assert find_divergences(model, TOKENIZER, texts, depths[0], depths) == []
    assert list(depths) == [0, 1, 2, "auto"]
    assert all(trial.sequences == depths[0].sequences for trial in depths.values())
    assert all(len(answer) == TOKENS for answer in depths[0].sequences)
    assert all(trial.exact and trial.rate > 0 for trial in depths.values())
    assert len(doing) == 4 * (1 + 3)  # once to warm up
    assert doing[4] == "text 0, k=0"


def test_a_divergence_has_its_position_and_its_tokens_and_is_no_rounding_where_the_same_are_promised() -> None:
    model = random_model("dense")
    prompt = random_prompt(model, 6, 1)
    plain = decode_depths(model, {"code": prompt}, 1, TOKENS, lambda doing: None)[0]
    answer = plain.sequences[0]
    other = (answer[3] + 1) % model.vocabulary
    drafted = replace(plain, sequences=[[*answer[:3], other, *answer[4:]]])
    (found,) = find_divergences(model, TOKENIZER, {"code": prompt}, plain, {2: drafted})
    assert (found.k, found.prompt, found.position) == (2, "code", 3)
    assert (found.plain, found.drafted) == (TOKENIZER.decode([answer[3]]), TOKENIZER.decode([other]))
    assert not found.rounding


def test_a_near_tie_is_one_of_logits() -> None:
    model = random_model("dense")
    text = random_prompt(model, 6, 1)
    logits = model.logits(model.trunk(mx.array([text]), model.make_state(1), certain=6))[0, -1]
    likeliest, *others = mx.argsort(-logits).tolist()[:8]
    gaps = {token: (logits[likeliest] - logits[token]).item() for token in others}
    assert max(gaps.values()) > NEAR_TIE
    for token, gap in gaps.items():
        assert is_near_tie(model, text, likeliest, token) == is_near_tie(model, text, token, likeliest)
        assert is_near_tie(model, text, likeliest, token) == (gap <= NEAR_TIE)
    assert is_near_tie(model, text, likeliest, likeliest)
    assert not is_near_tie(model, text, likeliest, mx.argmin(logits).item())


def test_kernels_that_crashed_on_this_machine_are_named() -> None:
    crashed = "product 12×32: metal crashed: the process or the machine ended when it was tried"
    report = replace(probed(), excluded=[crashed])
    assert report.passed
    assert f"Not used on this machine: {crashed}." in report.markdown()
    assert report.as_dict()["excluded_kernels"] == [crashed]


def test_every_divergence_is_reported_with_its_tokens() -> None:
    report = probed(different(), different())
    assert not report.passed
    first = json.loads(json.dumps(report.as_dict()))["first_divergence"]
    assert (first["prompt"], first["k"], first["position"], first["rounding"]) == ("chat", 2, 1, False)
    assert (first["plain"], first["drafted"]) == ("a", "b")
    sentence = "Not as in plain decoding: k = 2, chat prompt, token 2 is 'b' instead of 'a', a mistake."
    assert list(report.conclusions()).count(sentence) == 2
    assert "| 2    | 0 of 2 " in report.markdown()


def test_rounding_excuses_a_divergence_and_is_reported() -> None:
    report = probed(different(rounding=True), exact=False)
    assert report.passed
    assert not probed(different(rounding=True), different(), exact=False).passed
    assert "- The same tokens are not promised: " in report.markdown()
    assert "token 2 is 'b' instead of 'a', a near-tie that rounding decides.\n" in report.markdown()


def test_kernels_that_round_by_the_number_of_rows_are_recognised_and_their_near_ties_excused() -> None:
    model = rounding_model()
    assert not is_batch_invariant(model)
    texts = {f"text {n}": random_prompt(model, 6 + n, n) for n in range(8)}
    depths = decode_depths(model, texts, 2, TOKENS, lambda doing: None)
    del depths["auto"]  # its depths, and so its noise, depend on how fast the machine is
    found = find_divergences(model, TOKENIZER, texts, depths[0], depths)
    assert found  # else nothing is shown here
    assert all(divergence.rounding for divergence in found)
    promised = {k: replace(trial, exact=True) for k, trial in depths.items()}
    found = find_divergences(model, TOKENIZER, texts, promised[0], promised)
    assert not any(divergence.rounding for divergence in found)


def test_a_head_that_mostly_drafts_wrong_fails_though_every_answer_is_right() -> None:
    def with_first_drafts(accepted: int) -> ProbeReport:
        return probed(one=decoded(4, 0.5, [121], [accepted]))

    assert probed().passed
    assert with_first_drafts(59).passed  # 49 %, which may be chance
    broken = with_first_drafts(40)
    assert not broken.passed
    text = broken.markdown()
    assert "33% of 121 first drafts are accepted: too few for a sound head. Its weights are damaged or belong" in text
    assert "- the remedy\n" in text
    assert "- the remedy\n" not in probed().markdown()


def test_the_k_that_pays_is_the_one_with_most_tokens_a_second() -> None:
    report = probed()
    assert report.best_k == 1
    assert "Speculation pays here: k = 1 is 1.20× as fast as no drafts." in report.markdown()
    text = probed(one=replace(ONE, seconds=0.61), two=replace(TWO, seconds=0.61)).markdown()
    assert "Speculation does not pay here: no depth is faster than decoding without drafts." in text
    shown = report.as_dict()
    assert shown["cost_by_k"]["1"] == pytest.approx({"seconds": 0.125, "ratio": 1.25})
    assert shown["tokens_per_round"] == {"0": 1.0, "1": 1.5, "2": 2.0, "auto": 2.0}
    assert (shown["best_k"], shown["first_draft_acceptance"]) == (1, 0.8)


def test_acceptance_of_positions_that_were_hardly_tried_is_not_shown() -> None:
    text = probed(two=decoded(3, 0.57, [20, 9], [15, 9])).markdown()
    assert "Accepted by position at k = 2, together with all before it: 75%.\n" in text


def test_the_shortest_prompt_of_each_kind_is_decoded() -> None:
    prompts = probe_prompts(TOKENIZER)
    assert list(prompts) == list(KINDS)
    assert len(prompts["code"]) == min(len(each.tokens(TOKENIZER)) for each in builtin_prompts(["code"]))
