"""What the engine generates follows the law of its own logits: every rule, parameter and depth in one mixed batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from chisquare import statistic, tail
from crowd import LENGTH, Case, exact_law, first_tokens, small_model

from fixtures import assert_greedy, collect, submit
from headstart.engine import Engine, Request
from headstart.engine.batch import Batch
from headstart.engine.draft import Source
from headstart.engine.step import StepResult, step
from headstart.models import Model
from headstart.sampling import SamplingParams
from headstart.sampling.distribution import Distribution

P = SamplingParams
Run = Callable[[Model, Batch, int], StepResult]
judging = import_module("headstart.kernels.sampling")
PROMPT = (3, 4, 3)
REPEATED = (3, 4, 3, 5, 3, 4, 3)  # its last tokens occurred before
SIGNIFICANT = 0.001
SAMPLES = 400
SAMPLED = {  # with the drafts a round that each row may have: all of them decode in one batch
    "temperature 1": (P(temperature=1.0), 3),
    "temperature 1, deep": (P(temperature=1.0), 5),
    "temperature .6": (P(temperature=0.6), 1),
    "temperature .6, top_k": (P(temperature=0.6, top_k=4), 3),
    "top_k": (P(temperature=1.0, top_k=6), 5),
    "top_p": (P(temperature=1.0, top_p=0.9), 3),
    "temperature .6, top_p": (P(temperature=0.6, top_p=0.95), 5),
    "min_p": (P(temperature=1.0, min_p=0.05), 1),
    "top_n_sigma": (P(temperature=1.0, top_n_sigma=2), 3),
    "temperature .6, min_p, top_k, top_p": (P(temperature=0.6, min_p=0.02, top_k=8, top_p=0.95), 3),
    "repetition": (P(temperature=1.0, repetition_penalty=1.5), 3),
    "presence": (P(temperature=1.0, presence_penalty=1.0), 5),
    "frequency": (P(temperature=1.0, frequency_penalty=0.7, frequency_context_size=3), 3),
    "all generated": (P(temperature=1.0, presence_penalty=0.8, presence_context_size=None), 3),
    "bias": (P(temperature=1.0, logit_bias={5: 1.5, 3: -1.0}), 1),
    "coupled": (P(temperature=1.0, accept="coupled"), 3),
    "coupled, truncated, penalised": (P(temperature=0.6, top_p=0.97, presence_penalty=0.5, accept="coupled"), 5),
}
GREEDY = {"greedy": (P(), 3), "greedy, penalised": (P(repetition_penalty=1.3), 5)}


@lru_cache
def laws(prompt: tuple[int, ...] = PROMPT) -> dict[str, np.ndarray]:
    return {name: exact_law(small_model(), prompt, params) for name, (params, _) in {**SAMPLED, **GREEDY}.items()}


def measured(
    names: list[str],
    samples: int,
    seed: int = 0,
    prompt: tuple[int, ...] = PROMPT,
    run: Run = step,
    block: bool = False,
) -> dict[str, np.ndarray]:
    """[samples, LENGTH] of each, from keys that are random but the same every time: no test here has bad luck."""
    rng = np.random.default_rng(seed)
    cases = []
    for name in names:
        params, ceiling = {**SAMPLED, **GREEDY}[name]
        if params.accept == "coupled":
            keys = range(samples)  # seeds, as people choose them
        else:
            keys = [int(key) for key in rng.integers(0, 2**63, 20 if name in GREEDY else samples)]
        cases.append(Case(params, ceiling, keys))
    return dict(zip(names, first_tokens(small_model(block=block), prompt, cases, run=run), strict=True))


def against(
    found: dict[str, np.ndarray], prompt: tuple[int, ...] = PROMPT
) -> dict[tuple[str, int], tuple[float, int]]:
    """The statistic of the first token, of the first two and of the first three, for each request."""
    V, results = small_model().vocabulary, {}
    for name, tokens in found.items():
        for n in range(1, LENGTH + 1):
            cells = np.ravel_multi_index(tuple(tokens[:, :n].T), (V,) * n)
            law = laws(prompt)[name].sum(axis=tuple(range(n, LENGTH)))
            results[name, n] = statistic(np.bincount(cells, minlength=V**n), law)
    return results


def worst(results: dict[tuple[str, int], tuple[float, int]]) -> float:
    """The smaller of two p-values, corrected: that of the worst request, and that of all first tokens together."""
    firsts = [result for (_, n), result in results.items() if n == 1]
    together = tail(sum(x for x, _ in firsts), sum(freedom for _, freedom in firsts))
    return 2 * min(together, len(results) * min(tail(*result) for result in results.values()))


@pytest.mark.slow
def test_a_mixed_batch_follows_the_law_of_its_own_logits() -> None:
    found = measured([*SAMPLED, *GREEDY], SAMPLES)
    results = against({name: found[name] for name in SAMPLED})
    assert worst(results) > SIGNIFICANT, {at: tail(*result) for at, result in results.items()}
    assert min(freedom for (_, n), (_, freedom) in results.items() if n == 2) >= 4  # there was something to see
    for name in GREEDY:
        assert (found[name] == np.unravel_index(laws()[name].argmax(), laws()[name].shape)).all()


@pytest.mark.slow  # test_exact_by_enumeration.py has them without chance
@pytest.mark.parametrize("source", Source)
def test_copies_leave_the_law_as_it_is_whatever_else_drafts(source: Source) -> None:
    """A copy is drafted with certainty. For other sequences the head drafts, of all tokens or of half, or a block
    drafter, or nothing."""

    def run(model: Model, batch: Batch, k: int) -> StepResult:
        half = model.with_draft_vocabulary(list(range(0, model.vocabulary, 2)), "every other")
        return step(half, batch, k, source=source, distances=[4 * (row % 2) for row in range(batch.size)])

    found = measured([*SAMPLED, *GREEDY], SAMPLES, prompt=REPEATED, run=run, block=source is Source.BLOCK)
    results = against({name: found[name] for name in SAMPLED}, REPEATED)
    assert worst(results) > SIGNIFICANT, {at: tail(*result) for at, result in results.items()}
    for name in GREEDY:
        law = laws(REPEATED)[name]
        assert (found[name] == np.unravel_index(law.argmax(), law.shape)).all()


def biased(original: Callable[..., Distribution], off: float) -> Callable[..., Distribution]:
    """The target's first token moved by a total variation of `off` to the least probable token that is possible."""

    def distribution(logits, context, first):
        found = original(logits, context, first)
        if logits.shape[1] == 1:
            return found  # the drafter's
        p = mx.exp(found.logp)
        rarest = mx.argmin(mx.where(p > 0, p, 2), axis=-1, keepdims=True)
        one_hot = (mx.arange(p.shape[-1]) == rarest).astype(p.dtype)
        share = off / (1 - mx.take_along_axis(p, rarest, axis=-1))
        here = (mx.arange(p.shape[1]) == 0)[:, None] & (context.rounds == 0)[:, None, None]
        return Distribution(found.ids, mx.log(mx.where(here, (1 - share) * p + share * one_hot, p)))

    return distribution


@pytest.mark.slow
@pytest.mark.usefixtures("stock_ops")
def test_a_bias_of_two_hundredths_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "distribution", biased(judging.distribution, 0.02))
    assert worst(against(measured([*SAMPLED], SAMPLES))) < SIGNIFICANT


@pytest.mark.usefixtures("stock_ops")
def test_resampling_from_the_target_instead_of_the_residual_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(p, q, carry, accepted, allowed):
        return mx.take_along_axis(p, accepted[:, None, None], axis=1).squeeze(1)

    monkeypatch.setattr(judging, "residual_distribution", target)
    assert worst(against(measured(["temperature 1", "top_p"], SAMPLES))) < SIGNIFICANT


def test_greedy_sequences_stay_greedy_among_sampled_ones() -> None:
    """Sixteen sequences through the engine's own loop, with everything in SAMPLED around four greedy ones."""
    model = small_model()
    engine, greedy = Engine(model, max_sequences=16), []
    for n, (params, ceiling) in enumerate([*SAMPLED.values()][:12]):
        if n % 3 == 0:
            greedy.append(submit(engine, [n, 7], k=n % 6, max_tokens=24))
        engine.submit(Request([n, 2, 3], replace(params, k=ceiling, max_tokens=24)))
    for n, handle in enumerate(greedy):
        assert_greedy(model, [3 * n, 7], collect(handle).tokens)
