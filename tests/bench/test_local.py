"""Decoding a batch: sequences begin together, and only steps of the full batch are timed."""

import pytest

from fixtures import mlx_lm_greedy, random_model, random_prompt
from headstart.bench.local import K, decode_batch, measure_locally
from headstart.bench.plan import Condition
from headstart.engine import DepthController, Engine
from headstart.errors import HeadstartError, RequestError

PROMPTS = [random_prompt(random_model(), length, seed=length) for length in (4, 600, 2)]


@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.slow) for k in (0, 2)), "auto"])
def test_the_tokens_are_those_of_plain_decoding(k: K) -> None:
    trial = decode_batch(random_model(), PROMPTS, k, tokens=12)
    assert trial.exact
    assert max(map(len, trial.sequences)) == 12
    for prompt, sequence in zip(PROMPTS, trial.sequences, strict=True):
        assert sequence == mlx_lm_greedy(random_model(), prompt, 12)[: len(sequence)]


def test_the_first_step_is_not_timed_and_all_others_are() -> None:
    trial = decode_batch(random_model(), PROMPTS, 0, tokens=12)
    assert trial.tokens == 3 * 11
    assert trial.rate == trial.tokens / trial.seconds > 0
    assert (trial.tokens_per_round, list(trial.proposed)) == (1.0, [])


def test_drafts_are_counted_by_position() -> None:
    trial = decode_batch(random_model(), PROMPTS, 3, tokens=12)
    assert len(trial.proposed) == len(trial.accepted) == 3
    assert all(accepted <= proposed for accepted, proposed in zip(trial.accepted, trial.proposed, strict=True))
    assert trial.tokens_per_round is not None
    assert 1 <= trial.tokens_per_round <= 4


def test_a_fixed_depth_teaches_the_judged_controller_nothing_and_auto_goes_on_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taught: list[DepthController] = []
    monkeypatch.setattr(DepthController, "observe", lambda depth, *outcome: taught.append(depth))
    shared = Engine(random_model()).depth
    decode_batch(random_model(), PROMPTS[:1], 1, tokens=20)
    assert taught
    assert shared not in taught
    decode_batch(random_model(), PROMPTS[:1], "auto", tokens=20)
    assert taught[-1] is shared


def test_a_batch_larger_than_the_prompts_repeats_them() -> None:
    measure = measure_locally(random_model(), {"a": PROMPTS[:2]}, tokens=20)
    trial = measure("k=1", Condition("a", "batch_size", 3), 0)
    assert len(trial.sequences) == 3
    shorter = min(len(trial.sequences[0]), len(trial.sequences[2]))
    assert trial.sequences[0][:shorter] == trial.sequences[2][:shorter]


def test_a_prompt_that_cannot_be_prefilled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("headstart.engine.prefill.prefill_by_layers", fail)
    with pytest.raises(HeadstartError, match="ValueError: no"):
        decode_batch(random_model(), PROMPTS, 0, tokens=12)


def test_too_few_tokens_to_time_are_refused() -> None:
    with pytest.raises(RequestError, match="--tokens 1: generated in one step, too few to time"):
        decode_batch(random_model(), PROMPTS[:1], 0, tokens=1)
